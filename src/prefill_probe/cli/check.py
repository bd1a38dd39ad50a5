"""``prefill-probe check``: an engine command line, tried on this machine's GPU."""

from __future__ import annotations

import click

from prefill_probe.faults import EX_UNAVAILABLE


@click.command()
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
