"""``prefill-probe systemd``: the units of a deployment."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from prefill_probe.cli.engine_command import serve_arguments
from prefill_probe.systemd.manager import Manager
from prefill_probe.systemd.units import Deployment, engine_unit_name


def _service(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        return engine_unit_name(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


_OPTIONS = (
    click.option("--engine-unit", required=True, metavar="NAME", callback=_service, help="The engine's service."),
    click.option("--user", is_flag=True, help="Units for `systemctl --user`."),
    click.option("--check-first", is_flag=True, help="Also check before each start of the engine (ExecStartPre=)."),
    click.option("--run-as", metavar="USER", default="", help="User of the smoke test: that of the engine's service."),
    click.option(
        "--start-timeout",
        "start_seconds",
        type=click.IntRange(min=1),
        default=1800,
        show_default=True,
        metavar="SECONDS",
        help="For a model load and a probe.",
    ),
    click.argument("command", nargs=-1, type=click.UNPROCESSED),
)


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.group()
def systemd() -> None:
    """A smoke test, and a drop-in for an engine's service.

    \b
    Example:
      prefill-probe systemd print --engine-unit freetoken
    """


@systemd.command("print")
@_with_options
def print_units(**given: Any) -> None:
    """Print the units. With a command after --, the drop-in starts the service with it.

    \b
    Example:
      prefill-probe systemd print --engine-unit freetoken -- ft serve --model /models/m
    """
    directory = Manager(given["user"], os.environ).configuration
    files = [f"# {directory / name}\n{text}" for name, text in _texts(given).items()]
    click.echo("\n".join(files), nl=False)


@systemd.command()
@_with_options
@click.option("--directory", type=click.Path(path_type=Path), help="Instead of systemd's directory.")
@click.option("--force", is_flag=True, help="Replace files that differ.")
def install(directory: Path | None, force: bool, **given: Any) -> None:
    """Write the units; nothing is reloaded or started. A file that differs is kept, unless --force.

    \b
    Example:
      prefill-probe systemd install --engine-unit freetoken -- ft serve --model /models/m
    """
    directory = directory or Manager(given["user"], os.environ).configuration
    files = {directory / name: text for name, text in _texts(given).items()}
    try:
        changed = {path: text for path, text in files.items() if _content(path) != text}
        if kept := [path for path in changed if _content(path) is not None and not force]:
            raise click.UsageError(f"{kept[0]} exists and differs; --force replaces it")
        _write(changed)
    except (OSError, UnicodeDecodeError) as error:
        where = getattr(error, "filename", None) or directory
        raise click.UsageError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    for path in files:
        click.echo(f"{'wrote' if path in changed else 'unchanged'} {path}")
    systemctl, name = "systemctl --user" if given["user"] else "systemctl", given["engine_unit"]
    journal = "journalctl --user" if given["user"] else "journalctl"
    click.echo(
        f"Next:\n"
        f"  {systemctl} daemon-reload\n"
        f"  {systemctl} start prefill-probe@{name}   # the smoke test; it needs the GPU's memory for itself\n"
        f"  {journal} -u prefill-probe@{name}\n"
        f"  {systemctl} restart {name}"
    )


def _texts(given: dict[str, Any]) -> dict[str, str]:
    """The files to write.

    Raises:
        click.UsageError: a command that is not the engine's, or that cannot be written in a unit.
    """
    command: tuple[str, ...] = given["command"]
    if command:
        serve_arguments(command)
        command = (_program(command[0]), *command[1:])
    if given["user"] and given["run_as"]:
        raise click.UsageError("--run-as: a user's manager runs everything as that user")
    chosen = {name: given[name] for name in ("user", "check_first", "start_seconds", "run_as")}
    try:
        return Deployment(_program("prefill-probe"), given["engine_unit"], command, **chosen).files()
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _program(name: str) -> str:
    """The absolute path of a program: in this environment, or on the path."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=places)
    if found is None:
        raise click.UsageError(f"{name}: no such program here; give its path")
    return str(Path(found).absolute())


def _content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _write(files: dict[Path, str]) -> None:
    """Write all of ``files``, or none: each is complete beside its place before the first is moved there."""
    ready: dict[Path, Path] = {}
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            ready[path] = Path(temporary)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            ready[path].chmod(0o644)
        for path, prepared in ready.items():
            prepared.replace(path)
    finally:
        for prepared in ready.values():
            prepared.unlink(missing_ok=True)
