"""The service manager that a unit belongs to: where its units lie, and what its specifiers stand for."""

from __future__ import annotations

import grp
import os
import platform
import pwd
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefill_probe.systemd.errors import UnitError

NAME = re.compile(r"[A-Za-z0-9:_.\\@-]+")


@dataclass(frozen=True)
class Manager:
    """The system's manager, or a user's."""

    user: bool
    environ: Mapping[str, str]

    @property
    def home(self) -> Path:
        return Path(self.environ.get("HOME") or Path.home()) if self.user else Path("/root")

    @property
    def configuration(self) -> Path:
        """Where an administrator, or a user, puts units."""
        if not self.user:
            return Path("/etc/systemd/system")
        return self._xdg("XDG_CONFIG_HOME", ".config") / "systemd" / "user"

    @property
    def directories(self) -> list[Path]:
        """Where units are looked for, the first that has one wins (systemd.unit(5))."""
        if not self.user:
            roots = [Path(each) for each in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")]
            return [root / "systemd" / "system" for root in roots]
        runtime = self.environ.get("XDG_RUNTIME_DIR")
        roots = [Path("/etc"), *([Path(runtime)] if runtime else []), Path("/run")]
        roots += [self._xdg("XDG_DATA_HOME", ".local/share"), Path("/usr/local/lib"), Path("/usr/lib")]
        return [self.configuration, *(root / "systemd" / "user" for root in roots)]

    def _xdg(self, variable: str, default: str) -> Path:
        return Path(self.environ.get(variable) or self.home / default)

    def expand(self, text: str, unit: str, file: Path) -> str:
        """``text`` with the specifiers of ``unit`` (its name) resolved; ``file`` is the unit's file.

        Raises:
            ValueError: a specifier that is not known here; the text names it.
        """
        if "%" not in text:
            return text
        known = _names(unit, file) | self._places()

        def resolved(found: re.Match[str]) -> str:
            if not known.get(found[1]):
                raise ValueError(f"the specifier {found[0]} cannot be resolved here; write %% for a per cent sign")
            return known[found[1]]

        return re.sub(r"%(.?)", resolved, text, flags=re.DOTALL)

    def _places(self) -> dict[str, str]:
        host = socket.gethostname()
        known = {"h": str(self.home), "H": host, "l": host.partition(".")[0], "v": platform.release()}
        with suppress(KeyError):  # a container's user may have no name
            account = pwd.getpwuid(os.getuid() if self.user else 0)
            known |= {"u": account.pw_name, "U": str(account.pw_uid), "G": str(account.pw_gid)}
            known["g"] = grp.getgrgid(account.pw_gid).gr_name
        if not self.user:
            known |= {"t": "/run", "S": "/var/lib", "C": "/var/cache", "L": "/var/log", "E": "/etc"}
            return known | {"T": "/tmp", "V": "/var/tmp"}
        # %S and %L of a user's units depend on the version of systemd (254), so they are not resolved.
        folders = {"C": self._xdg("XDG_CACHE_HOME", ".cache"), "E": self._xdg("XDG_CONFIG_HOME", ".config")}
        known |= {letter: str(folder) for letter, folder in folders.items()}
        return known | {"t": self.environ.get("XDG_RUNTIME_DIR", "")}


def _names(unit: str, file: Path) -> dict[str, str]:
    stem = unit.rpartition(".")[0]
    prefix, at, instance = stem.partition("@")
    last = prefix.rpartition("-")[2]
    known = {"%": "%", "n": unit, "N": stem, "p": prefix, "P": _unescape(prefix), "j": last, "J": _unescape(last)}
    known |= {"y": str(file), "Y": str(file.parent), "f": "/" + _unescape(instance if at else prefix).lstrip("/")}
    return known | ({"i": instance, "I": _unescape(instance)} if at else {})


def _unescape(text: str) -> str:
    """A part of a unit's name as ``systemd-escape --unescape`` prints it."""
    raw = re.sub(rb"\\x([0-9a-fA-F]{2})", lambda found: bytes([int(found[1], 16)]), text.replace("-", "/").encode())
    return raw.decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Found:
    """A unit: its name, its file, its drop-ins in the order that systemd reads them, and whose it is."""

    name: str
    file: Path
    drop_ins: list[Path]
    manager: Manager

    def expand(self, text: str) -> str:
        """``text`` with its specifiers resolved.

        Raises:
            ValueError: a specifier that is not known here; the text names it.
        """
        return self.manager.expand(text, self.name, self.file)


def find_unit(unit: Path, environ: Mapping[str, str]) -> Found:
    """The unit of a file, or, without a slash, of a name that systemd knows (``.service`` may be left out).

    Raises:
        UnitError: there is none, or the system's manager and the user's both have it.
    """
    managers = [Manager(False, environ), Manager(True, environ)]
    if len(unit.parts) > 1 or unit.is_file():
        file = unit.absolute()
        if not file.is_file():
            raise UnitError(f"{unit}: no such file")
        owner = next((each for each in managers if file.parent in each.directories), None)
        folders = owner.directories if owner else [file.parent]
        user = owner.user if owner else file.parent.parts[-2:] == ("systemd", "user")
        return Found(file.name, file, _drop_ins(file.name, folders), Manager(user, environ))
    name = str(unit) if str(unit).endswith(".service") else f"{unit}.service"
    found = [
        Found(name, first, _drop_ins(name, manager.directories), manager)
        for manager in managers
        if (first := _first(name, manager.directories)) is not None
    ]
    if not found:
        raise UnitError(f"{name}: no unit of this name in {', '.join(str(each) for each in managers[0].directories)}")
    if len(found) > 1:
        raise UnitError(f"{name}: both {found[0].file} and {found[1].file}; give the path of one")
    return found[0]


def _first(name: str, folders: list[Path]) -> Path | None:
    """The file of a unit: its own, else its template's."""
    template = re.sub(r"@.*(\.\w+)$", r"@\1", name)
    candidates = (folder / each for each in dict.fromkeys((name, template)) for folder in folders)
    return next((file for file in candidates if file.is_file()), None)


def _drop_ins(name: str, folders: list[Path]) -> list[Path]:
    """The drop-ins of a unit, by file name; of two with one name the more specific counts, then the earlier folder.

    ``a-b@c.service`` has those in ``a-b@c.service.d``, ``a-b@.service.d``, ``a-.service.d`` and ``service.d``.
    """
    stem, _, kind = name.rpartition(".")
    prefix, at, _ = stem.partition("@")
    parts = prefix.split("-")
    stems = [stem, prefix + at, *("-".join(parts[:count]) + "-" for count in range(len(parts) - 1, 0, -1))]
    found: dict[str, Path] = {}
    for owner in [*(f"{each}.{kind}.d" for each in dict.fromkeys(stems)), f"{kind}.d"]:
        for folder in folders:
            for file in (folder / owner).glob("*.conf"):
                found.setdefault(file.name, file)
    return [found[each] for each in sorted(found)]
