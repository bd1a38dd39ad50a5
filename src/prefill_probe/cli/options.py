"""What ``check`` and ``estimate`` share: their options, the engine's command line, and how they end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from prefill_probe.cli.engine_command import enter_unit, serve_arguments
from prefill_probe.settings import ProbeSettings, parse_report, parse_seconds
from prefill_probe.sizes import parse_size

if TYPE_CHECKING:
    from prefill_probe.record import ProbeRecord


class Checked(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """An option's type by a function that parses its text or raises ``ValueError``."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ValueError(f"{text!r} is not a share of memory; write a number above 0 and at most 1")
    return ratio


_INSTEAD = "Instead of what the command line says."
_OPTIONS = (
    click.option("--max-prefill-length", type=click.IntRange(min=1), help=_INSTEAD),
    click.option("--memory-ratio", type=Checked("ratio", _ratio), help=_INSTEAD),
    click.option("--model", metavar="DIR", help=_INSTEAD),
    click.option("--layers", type=click.IntRange(min=1), help="Run only the first so many of the model."),
    click.option("--unit", metavar="FILE", type=click.Path(path_type=Path), help="The command of this systemd unit."),
    click.option("--margin", type=Checked("size", parse_size), help="Headroom that must remain.  [default: 128MiB]"),
    click.option("--timeout", type=Checked("seconds", parse_seconds), help="After this it hangs.  [default: 300]"),
    click.option("--report", type=Checked("file", parse_report), help="Write the record to this file."),
    click.option("--metrics", type=click.Path(path_type=Path), help="Write metrics for node exporter: a .prom file."),
    click.option("--json", "as_json", is_flag=True, help="Print the record alone."),
    click.option("-v", "--verbose", is_flag=True, help="Show the engine's log."),
    click.argument("command", nargs=-1, type=click.UNPROCESSED),
)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """The shared options on a command, which takes them as keyword arguments: those of ``Given``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@dataclass
class Given:
    """The shared options as they were given; None: not."""

    max_prefill_length: int | None
    memory_ratio: float | None
    model: str | None
    layers: int | None
    unit: Path | None
    margin: int | None
    timeout: float | None
    report: Path | None
    metrics: Path | None
    as_json: bool
    verbose: bool
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.unit is not None:
            # What is given here is meant from here; the unit has a directory of its own.
            self.report, self.metrics = (path and path.absolute() for path in (self.report, self.metrics))
            if self.model is not None and Path(self.model).exists():
                self.model = str(Path(self.model).absolute())
            self.command = enter_unit(self.unit, self.command)
        self._need_places()

    def _need_places(self) -> None:
        """What is to be written at the end can be, as far as is known before minutes are spent.

        Raises:
            click.UsageError: it cannot.
        """
        from prefill_probe.metrics import MetricsError, check_path
        from prefill_probe.record import check_place

        try:
            if self.report is not None:
                check_place(self.report)
        except OSError as error:
            raise click.UsageError(f"--report {error.filename}: {error.strerror}") from None
        try:
            if self.metrics is not None:
                check_path(self.metrics)
        except MetricsError as error:
            raise click.UsageError(f"--metrics {error}") from None

    @property
    def for_reference(self) -> dict[str, Any]:
        """Arguments of the reference engine's functions, as far as they were given."""
        names = ("model", "layers", "memory_ratio", "max_prefill_length")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def arguments(self) -> list[str]:
        """What follows ``ft serve``, with what is given instead.

        Raises:
            click.UsageError: the command is not the engine's, or names no model.
        """
        arguments = serve_arguments(self.command)
        for flag in ("--model", "--memory-ratio", "--max-prefill-length"):
            value = getattr(self, flag.lstrip("-").replace("-", "_"))
            arguments += [] if value is None else [flag, str(value)]
        if not any(word.startswith("--model") for word in arguments):
            raise click.UsageError("the command line names no model; add --model DIR")
        return arguments

    @property
    def settings(self) -> ProbeSettings:
        """Of the probe."""
        return ProbeSettings(margin_bytes=self.margin, timeout_seconds=self.timeout or ProbeSettings.timeout_seconds)


def finish(record: ProbeRecord, given: Given, report: Path | None) -> NoReturn:
    """Write the record to ``report``, print it as asked, and end with the status of its verdict."""
    from prefill_probe.metrics import MetricsError, write_metrics
    from prefill_probe.record import write_record
    from prefill_probe.render.screen import screen, terminal_width
    from prefill_probe.render.text import error_for

    try:
        if report is not None:
            write_record(record, report)
        if given.metrics is not None:
            write_metrics(record, given.metrics)
    except OSError as error:
        raise click.UsageError(f"--report {report}: {error.strerror}") from None
    except MetricsError as error:
        raise click.UsageError(f"--metrics {error}") from None
    if given.as_json:
        click.echo(record.to_json(), nl=False)
    else:
        click.echo(screen(record, terminal_width()), color=False if os.environ.get("NO_COLOR") else None)
    stopped_by = error_for(record)
    raise SystemExit(stopped_by.exit_status if stopped_by is not None else 0)


def end(command: str, status: int, text: str) -> NoReturn:
    """End without a record: why, on standard error, and the status."""
    click.echo(f"prefill-probe {command}: {text}", err=True)
    raise SystemExit(status)
