"""An engine's unit: the command, the environment and the directory that systemd would start it with."""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefill_probe.systemd.environment_file import NAME, parse_environment
from prefill_probe.systemd.errors import UnitError
from prefill_probe.systemd.manager import Found, find_unit
from prefill_probe.systemd.settings import Setting, read_settings
from prefill_probe.systemd.words import expand_variables, split_words, variables_in

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
    found = find_unit(unit, environ)
    settings = [each for file in (found.file, *found.drop_ins) for each in read_settings(file)]
    service = [each for each in settings if each.section == "Service"]
    if not service:
        raise UnitError(f"{found.file}: it has no [Service] section")
    environment: dict[str, str] = {}
    for setting in _listed(service, "Environment"):
        environment |= _assignments(found, setting)
    for setting in _listed(service, "EnvironmentFile"):
        environment |= _environment_file(found, setting)
    commands = _listed(service, "ExecStart")
    if not commands:
        raise UnitError(f"{found.file}: it has no ExecStart=")
    if len(commands) > 1:
        raise commands[1].error("a second command; an engine is one, after an empty ExecStart= in a drop-in")
    return EngineUnit(_command(found, commands[0], environment), environment, _directory(found, service))


def _listed(settings: list[Setting], key: str) -> list[Setting]:
    """The assignments of a list since it was last emptied."""
    found: list[Setting] = []
    for setting in settings:
        if setting.key == key:
            found = [*found, setting] if setting.value else []
    return found


def _expanded(found: Found, setting: Setting, text: str) -> str:
    try:
        return found.manager.expand(text, found.name, found.file)
    except ValueError as error:
        raise setting.error(str(error)) from None


def _split(setting: Setting, text: str) -> list[str]:
    try:
        return split_words(text)
    except ValueError as error:
        raise setting.error(str(error)) from None


def _assignments(found: Found, setting: Setting) -> dict[str, str]:
    """``NAME=value`` words; systemd skips what is not one."""
    words = (_expanded(found, setting, word).partition("=") for word in _split(setting, setting.value))
    return {name: value for name, equals, value in words if equals and NAME.fullmatch(name)}


def _environment_file(found: Found, setting: Setting) -> dict[str, str]:
    optional = setting.value.startswith("-")
    file = Path(_expanded(found, setting, setting.value.removeprefix("-")))
    if not file.is_absolute():
        raise setting.error(f"{file} is not an absolute path")
    files = sorted(file.parent.glob(file.name)) if any(letter in file.name for letter in "*?[") else [file]
    read: dict[str, str] = {}
    try:
        if not files:
            raise FileNotFoundError(2, "no such file")
        for each in files:
            read |= parse_environment(each.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if optional:
            return read
        raise setting.error(f"{file}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    return read


def _command(found: Found, setting: Setting, environment: dict[str, str]) -> list[str]:
    """The program and its arguments, without the prefixes of systemd.service(5)."""
    text = setting.value.lstrip("@-:+!")
    prefixes = setting.value[: len(setting.value) - len(text)]
    # A lone ; ends a command, \; is one that does not.
    raw = text.split()
    if ";" in raw:
        raise setting.error("a second command after ;")
    words = [_expanded(found, setting, word) for word in _split(setting, text)]
    words = [";" if word == "\\;" else word for word in words]
    if "@" in prefixes:
        words[1:2] = []
    if not words or not words[0]:
        raise setting.error("no program")
    if ":" in prefixes:
        return words
    if unknown := sorted((variables_in(words[1:]) & _SET_BY_SYSTEMD) - set(environment)):
        raise setting.error(f"${{{unknown[0]}}} is set by systemd when it starts the unit, and is not known here")
    return words[:1] + expand_variables(words[1:], environment)


def _directory(found: Found, service: list[Setting]) -> Path | None:
    given = next((each for each in reversed(service) if each.key == "WorkingDirectory"), None)
    if given is None or not given.value:
        return None
    text = _expanded(found, given, given.value.removeprefix("-"))
    if text == "~":
        return _home(found, given, service)
    if not Path(text).is_absolute():
        raise given.error(f"{text} is not an absolute path")
    return Path(text)


def _home(found: Found, given: Setting, service: list[Setting]) -> Path:
    user = next((each.value for each in reversed(service) if each.key == "User"), "")
    if not user:
        return found.manager.home
    try:
        return Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        raise given.error(f"~ is the home of {user}, who is not known here") from None
