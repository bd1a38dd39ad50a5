"""``prefill-probe hook``: whether ``ft serve`` of this environment is probed."""

from __future__ import annotations

import os

import click

from prefill_probe.faults import EX_UNAVAILABLE


@click.group()
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
