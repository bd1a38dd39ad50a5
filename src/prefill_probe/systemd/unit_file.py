"""An engine's unit: the command, the environment and the directory that systemd would start it with."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path

from prefill_probe.systemd.environment_file import NAME, parse_environment
from prefill_probe.systemd.errors import UnitError
from prefill_probe.systemd.manager import Found, find_unit
from prefill_probe.systemd.settings import Setting, read_settings
from prefill_probe.systemd.words import expand_variables, split_command, split_words, variables_in

# What the manager sets by itself, to values that are not known here.
_SET_BY_SYSTEMD = {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TERM", "MAINPID", "INVOCATION_ID"}
_SET_BY_SYSTEMD |= {
    f"{name}_DIRECTORY" for name in ("RUNTIME", "STATE", "CACHE", "LOGS", "CONFIGURATION", "CREDENTIALS")
}


@dataclass(frozen=True)
class EngineUnit:
    """What a unit starts.

    Attributes:
        arguments: the command, its program first.
        environment: what ``Environment=`` and ``EnvironmentFile=`` set.
        working_directory: None where the unit names none.
    """

    arguments: list[str]
    environment: dict[str, str]
    working_directory: Path | None


def read_unit(unit: Path, environ: Mapping[str, str]) -> EngineUnit:
    """The unit of a file, or, without a slash, of a name, with its drop-ins.

    Args:
        unit: ``freetoken.service``, ``freetoken`` or ``/path/to/freetoken.service``.
        environ: environment of the caller, which says where a user's units lie.

    Raises:
        UnitError: it cannot be read, or does not say what to start; one line that names the file, the line and why.
    """
    try:
        found = find_unit(unit, environ)
    except OSError as error:
        raise UnitError(f"{unit}: {error.strerror}") from None
    settings = [each for file in (found.file, *found.drop_ins) for each in read_settings(file)]
    service = [each for each in settings if each.section == "Service"]
    if not service:
        raise UnitError(f"{found.file}: it has no [Service] section")
    environment: dict[str, str] = {}
    for setting in _listed(service, "Environment"):
        with setting.blamed():
            words = split_words(setting.value, "only escape")
            environment |= _assignments([found.expand(word) for word in words])
    for setting in _listed(service, "EnvironmentFile"):
        with setting.blamed():
            environment |= _environment_file(found.expand(setting.value))
    commands = _listed(service, "ExecStart")
    if not commands:
        raise UnitError(f"{found.file}: it has no ExecStart=")
    with commands[-1].blamed():
        if len(commands) > 1:
            raise ValueError("a second command; a drop-in empties the list first, with ExecStart=")
        arguments = _command(found, commands[0].value, environment)
    directory = None
    for setting in _listed(service, "WorkingDirectory")[-1:]:
        with setting.blamed():
            user = next((each.value for each in reversed(service) if each.key == "User"), "")
            directory = _directory(found, found.expand(setting.value.removeprefix("-")), user)
    return EngineUnit(arguments, environment, directory)


def _listed(settings: list[Setting], key: str) -> list[Setting]:
    """The assignments of a list since it was last emptied."""
    found: list[Setting] = []
    for setting in settings:
        if setting.key == key:
            found = [*found, setting] if setting.value else []
    return found


def _assignments(words: list[str]) -> dict[str, str]:
    """``NAME=value`` words; a word that is not one is skipped, as systemd does."""
    parts = (word.partition("=") for word in words)
    return {name: value for name, equals, value in parts if equals and NAME.fullmatch(name)}


def _environment_file(text: str) -> dict[str, str]:
    file = Path(text.removeprefix("-"))
    if not file.is_absolute():
        raise ValueError(f"{file} is not an absolute path")
    files = sorted(file.parent.glob(file.name)) if any(letter in file.name for letter in "*?[") else [file]
    read: dict[str, str] = {}
    try:
        if not files:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        for each in files:
            read |= parse_environment(each.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if not text.startswith("-"):
            raise ValueError(f"{file}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    return read


def _command(found: Found, value: str, environment: dict[str, str]) -> list[str]:
    """The program and its arguments, without the prefixes of systemd.service(5)."""
    text = value.lstrip("@-:+!")
    prefixes = value[: len(value) - len(text)]
    words = [found.expand(word) for word in split_command(text)]
    if "@" in prefixes:  # the second word is what the program is to be called
        words[1:2] = []
    if not words or not words[0]:
        raise ValueError("no program")
    if ":" in prefixes:
        return words
    if unknown := sorted((variables_in(words[1:]) & _SET_BY_SYSTEMD) - set(environment)):
        raise ValueError(f"${{{unknown[0]}}} is set by systemd when it starts the unit, and is not known here")
    return words[:1] + expand_variables(words[1:], environment)


def _directory(found: Found, text: str, user: str) -> Path:
    if text == "~":
        try:
            return Path(pwd.getpwnam(user).pw_dir) if user else found.manager.home
        except KeyError:
            raise ValueError(f"~ is the home of {user}, who is not known here") from None
    if not text.startswith("/"):
        raise ValueError(f"{text} is not an absolute path")
    return Path(text)
