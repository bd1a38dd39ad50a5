"""``prefill-probe show``: what a probe found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from prefill_probe.record import ProbeRecord


class Refused(click.ClickException):
    """Bad input, said in one line."""

    exit_code = 2


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the record itself; of several, a JSON array.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw where the memory went: a .png or .svg file.")
@click.option("--timeline", type=click.Path(path_type=Path), help="Draw live memory over a chunk, by layer.")
@click.option("--metrics", type=click.Path(path_type=Path), help="Write metrics for node exporter: a .prom file.")
def show(
    files: tuple[Path, ...], as_json: bool, plot: Path | None, timeline: Path | None, metrics: Path | None
) -> None:
    """Show the last record of this machine, or FILE; several FILEs are compared in a table.

    \b
    Example:
      prefill-probe show
      prefill-probe show --plot memory.png record.json
      prefill-probe show a.json b.json
    """
    records = [(str(file), _read(file)) for file in files] or [_last()]
    if len(records) > 1 and (plot or timeline):
        raise Refused("a picture is of one record: give one FILE")
    _write(records, plot, timeline, metrics)
    if as_json:
        _print_json([record for _, record in records])
    elif not (plot or timeline or metrics):
        _print_text(records)


def _read(file: Path) -> ProbeRecord:
    from prefill_probe.record import RecordError, read_record

    try:
        return read_record(file)
    except RecordError as error:
        raise Refused(str(error)) from None


def _last() -> tuple[str, ProbeRecord]:
    from prefill_probe.record import default_report

    file = default_report(os.environ)
    if not file.exists():
        raise Refused(f"there is no record at {file} yet: start `ft serve`, or name a FILE")
    return str(file), _read(file)


def _write(
    records: list[tuple[str, ProbeRecord]], plot: Path | None, timeline: Path | None, metrics: Path | None
) -> None:
    """The files that are asked for: all are made before the first is written."""
    from prefill_probe.metrics import MetricsError, write_metrics
    from prefill_probe.metrics import check_path as check_metrics
    from prefill_probe.render import picture
    from prefill_probe.render import plot as plots
    from prefill_probe.render import timeline as timelines

    record = records[0][1]
    try:
        for path in (plot, timeline):
            if path is not None:
                picture.check_path(path)
        if metrics is not None:
            check_metrics(metrics)
        drawn = [(draw(record), path) for draw, path in ((plots.draw, plot), (timelines.draw, timeline)) if path]
        if metrics is not None:
            write_metrics([record for _, record in records], metrics)
            click.echo(f"metrics written to {metrics}", err=True)
            if metrics.suffix != ".prom":
                click.echo("node exporter reads only files that end in .prom", err=True)
        for figure, path in drawn:
            picture.write(figure, path)
            click.echo(f"picture written to {path}", err=True)
    except (picture.PictureError, MetricsError) as error:
        raise Refused(str(error)) from None


def _print_json(records: list[ProbeRecord]) -> None:
    if len(records) == 1:
        click.echo(records[0].to_json(), nl=False)
    else:
        click.echo("[\n" + ",\n".join(record.to_json().rstrip() for record in records) + "\n]")


def _print_text(records: list[tuple[str, ProbeRecord]]) -> None:
    """One record as a screen, several as a table; colours only on a terminal, and not with NO_COLOR."""
    from prefill_probe.render.screen import screen, terminal_width
    from prefill_probe.render.table import table, table_width

    text = screen(records[0][1], terminal_width()) if len(records) == 1 else table(records, table_width())
    click.echo(text, color=False if os.environ.get("NO_COLOR") else None)
