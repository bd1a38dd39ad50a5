"""The engine's command line as the commands take it: after ``--``, or from a systemd unit."""

from __future__ import annotations

import os
from pathlib import Path

import click

from prefill_probe.systemd.errors import UnitError


def serve_arguments(command: tuple[str, ...], where: str = "after -- comes the engine's command line") -> list[str]:
    """What follows ``ft serve`` in a command line.

    Raises:
        click.UsageError: it is not one.
    """
    if len(command) < 2 or Path(command[0]).name not in ("ft", "freetoken") or command[1] != "serve":
        given = " ".join(command[:2]) or "nothing"
        raise click.UsageError(f"{where}, ft serve --model DIR ..., not {given}")
    return list(command[2:])


def enter_unit(unit: Path, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command line of a systemd unit; its environment and its directory become this process's.

    Raises:
        click.UsageError: a command is given beside it, or the unit cannot be used.
    """
    from prefill_probe.systemd.unit_file import read_unit

    if command:
        raise click.UsageError("--unit has its own command line; leave out what follows --")
    try:
        engine = read_unit(unit, os.environ)
    except UnitError as error:
        raise click.UsageError(f"--unit {error}") from None
    arguments = tuple(engine.arguments)
    serve_arguments(arguments, f"--unit {unit}: its command is to be the engine's")
    if engine.working_directory is not None:
        try:
            os.chdir(engine.working_directory)
        except OSError as error:
            raise click.UsageError(f"--unit {unit}: WorkingDirectory={error.filename}: {error.strerror}") from None
    os.environ.update(engine.environment)
    return arguments
