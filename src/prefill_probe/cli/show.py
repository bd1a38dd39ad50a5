"""``prefill-probe show``: what a probe found."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command()
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
