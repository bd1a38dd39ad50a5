"""The command line: parse, call, render, exit. ``--help`` imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import click

from prefill_probe import __version__
from prefill_probe.cli.estimate import estimate
from prefill_probe.faults import EX_UNAVAILABLE

_CONTEXT = {"help_option_names": ["-h", "--help"], "ignore_unknown_options": False}


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__)
def main() -> None:
    """Run one full prefill chunk before an LLM engine serves.

    Installed beside FreeToken, every `ft serve` is probed by itself; these commands show what was found.

    \b
    Example:
      ft serve --model MODEL
      prefill-probe show
    """


@main.command()
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def check(command: tuple[str, ...]) -> None:
    """Check an engine command line before it is deployed (not available in this version).

    \b
    Example:
      prefill-probe check -- ft serve --model MODEL
    """
    click.echo(
        "prefill-probe: check needs a CUDA GPU and an engine, and is not available in this version.\n"
        "What is: on a machine with a CUDA GPU, install this package beside FreeToken and run\n"
        "  ft serve --model MODEL\n"
        "which runs a full prefill chunk before it answers. `prefill-probe show` prints what it found.",
        err=True,
    )
    raise SystemExit(EX_UNAVAILABLE)


main.add_command(estimate)


@main.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the record itself.")
def show(file: Path | None, as_json: bool) -> None:
    """Show the last record of this machine, or FILE.

    \b
    Example:
      prefill-probe show --json
    """
    from prefill_probe.record import RecordError, default_report, read_record
    from prefill_probe.render.text import error_for, log_line

    try:
        record = read_record(file or default_report(os.environ))
    except RecordError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(record.to_json(), nl=False)
        return
    click.echo(log_line(record))
    stopped_by = error_for(record)
    if stopped_by is not None:
        click.echo(f"{type(stopped_by).__name__}: {stopped_by}")


@main.group()
def hook() -> None:
    """Whether `ft serve` of this environment is probed."""


@hook.command()
def status() -> None:
    """Say whether FreeToken is here, and whether it keeps what the hook relies on.

    \b
    Example:
      prefill-probe hook status
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("freetoken")
    except PackageNotFoundError:
        click.echo("FreeToken is not installed in this environment: nothing is probed.", err=True)
        raise SystemExit(EX_UNAVAILABLE) from None
    import sys
    from importlib import import_module

    from engine_hooks.freetoken import versions

    contract = versions.CONTRACT | versions.SERVER_CONTRACT
    for module in contract:
        import_module(module)
    lacking = versions.missing(sys.modules, contract)
    read = "read" if found in versions.READ_VERSIONS else "not read, judged by its parts"
    click.echo(f"FreeToken {found} ({read})")
    if lacking:
        click.echo(f"not probed: it lacks {', '.join(lacking)}")
        raise SystemExit(EX_UNAVAILABLE)
    click.echo(f"probed at every start (PREFILL_PROBE={os.environ.get('PREFILL_PROBE') or 'enforce'})")
