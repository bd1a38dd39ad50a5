"""``prefill-probe hook``: whether ``ft serve`` of this environment is probed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from prefill_probe import __version__
from prefill_probe.faults import EX_UNAVAILABLE


@click.group()
def hook() -> None:
    """Whether `ft serve` of this environment is probed.

    \b
    Example:
      prefill-probe hook status
    """


@hook.command()
def status() -> None:
    """Say in three lines whether `ft serve` of this environment is probed, by what, and what is wrong if not.

    \b
    Example:
      prefill-probe hook status
    """
    wrong, engine = _engine()
    mode = os.environ.get("PREFILL_PROBE") or "enforce"
    if not wrong and mode == "off":
        wrong = "PREFILL_PROBE=off"
    click.echo(f"ft serve   {f'not probed: {wrong}' if wrong else 'probed at every start'}")
    click.echo(f"hook       prefill-probe {__version__}, mode {mode}, in {sys.prefix}")
    click.echo(f"engine     {engine}")
    if wrong:
        raise SystemExit(EX_UNAVAILABLE)


@hook.command()
def disable() -> None:
    """Switch the hook off in this environment, until `enable`; `ft serve` still takes its flags.

    \b
    Example:
      prefill-probe hook disable
    """
    from engine_hooks.freetoken import switch

    try:
        switch.file().parent.mkdir(parents=True, exist_ok=True)
        switch.file().touch()
    except OSError as error:
        raise click.UsageError(f"{switch.file()}: {error.strerror}") from None
    click.echo(
        f"`ft serve` of {sys.prefix} is not probed from its next start on; `prefill-probe hook enable` undoes this"
    )


@hook.command()
def enable() -> None:
    """Switch the hook on again.

    \b
    Example:
      prefill-probe hook enable
    """
    from engine_hooks.freetoken import switch

    try:
        switch.file().unlink(missing_ok=True)
    except OSError as error:
        raise click.UsageError(f"{switch.file()}: {error.strerror}") from None
    click.echo(f"`ft serve` of {sys.prefix} is probed at every start, unless PREFILL_PROBE=off")


def _engine() -> tuple[str, str]:
    """Why the engine of this environment is not probed (empty: it is), and which engine that is."""
    from importlib import import_module
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("freetoken")
    except PackageNotFoundError:
        return "FreeToken is not installed in this environment", _elsewhere() or "none"
    from engine_hooks.freetoken import switch, versions

    known = "read" if found in versions.READ_VERSIONS else "a version that was not read, judged by its parts"
    contract = versions.CONTRACT | versions.SERVER_CONTRACT
    try:
        for module in contract:
            import_module(module)
    except ImportError as error:
        return f"its modules cannot be imported: {error}", f"FreeToken {found} ({known})"
    lacking = versions.missing(sys.modules, contract)
    engine = f"FreeToken {found} ({known}), internals {'not ' if lacking else ''}as the hook knows them"
    if lacking:
        return f"it lacks {', '.join(lacking)}", engine
    if switch.is_off():
        return switch.SWITCHED_OFF, engine
    scheduler = sys.modules["freetoken.scheduler.scheduler"].Scheduler
    if not hasattr(scheduler.__init__, "__wrapped__"):
        return "the start-up file prefill_probe_hook.pth was not read; install this package again", engine
    if other := _elsewhere():
        engine += f"; but {other}"
    return "", engine


def _elsewhere() -> str:
    """An ``ft`` on the path that is not this environment's; empty if there is none."""
    found = shutil.which("ft")
    if found is None or Path(found).parent.resolve() == Path(sys.executable).parent.absolute().resolve():
        return ""
    return f"the `ft` on the path is another environment's ({found})"
