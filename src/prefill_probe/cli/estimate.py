"""``prefill-probe estimate``: an engine command line, tried on a virtual GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prefill_probe.cli.engine_command import enter_unit, serve_arguments
from prefill_probe.faults import EX_UNAVAILABLE
from prefill_probe.settings import parse_report, parse_seconds
from prefill_probe.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefill_probe.record import ProbeRecord
    from prefill_probe.settings import ProbeSettings
    from prefill_probe.virtual.device import Card

LARGEST_VRAM = 10 << 40
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")


class _Checked(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """An option's type by a function that parses its text or raises ``ValueError``."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _vram(text: str) -> int:
    size = parse_size(text)
    if not 0 < size <= LARGEST_VRAM:
        raise ValueError(f"{text!r} is not the memory of a GPU; write more than 0 and at most 10TiB")
    return size


def _capability(text: str) -> tuple[int, int]:
    match = _CAPABILITY.fullmatch(text)
    if match is None or int(match[1]) < 8:
        raise ValueError(f"{text!r} is not a compute capability; write 8.0 or higher, such as 12.0")
    return int(match[1]), int(match[2])


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ValueError(f"{text!r} is not a share of memory; write a number above 0 and at most 1")
    return ratio


@click.command()
@click.option("--vram", type=_Checked("size", _vram), help="Memory of the GPU, such as 15.5GiB, all of it usable.")
@click.option("--gpu", metavar="NAME", help='A card by name, such as "RTX 5080".')
@click.option("--capability", type=_Checked("x.y", _capability), help="Compute capability.  [default: 12.0]")
@click.option("--max-prefill-length", type=click.IntRange(min=1), help="Instead of what the command line says.")
@click.option("--memory-ratio", type=_Checked("ratio", _ratio), help="Instead of what the command line says.")
@click.option("--model", metavar="DIR", help="Instead of what the command line says.")
@click.option("--layers", type=click.IntRange(min=1), help="Of the reference engine's model.  [default: 4]")
@click.option("--unit", metavar="FILE", type=click.Path(path_type=Path), help="The command of this systemd unit.")
@click.option("--margin", type=_Checked("size", parse_size), help="Headroom that must remain.  [default: 128MiB]")
@click.option("--timeout", type=_Checked("seconds", parse_seconds), help="After this it hangs.  [default: 300]")
@click.option("--report", type=_Checked("file", parse_report), help="Write the record to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the record.")
@click.option("-v", "--verbose", is_flag=True, help="Show the engine's log.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def estimate(
    vram: int | None,
    gpu: str | None,
    capability: tuple[int, int] | None,
    max_prefill_length: int | None,
    memory_ratio: float | None,
    model: str | None,
    layers: int | None,
    unit: Path | None,
    margin: int | None,
    timeout: float | None,
    report: Path | None,
    as_json: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Try an engine command line on a virtual GPU: no GPU is needed, and no weights are read.

    With no command after -- it tries the built-in reference engine.
    Ends with 0 (fits), 78 (does not fit), 75 (cannot be traced), 2 (bad usage).

    \b
    Example:
      prefill-probe estimate --vram 15.5GiB -- ft serve --model DIR --memory-ratio 0.95
      prefill-probe estimate --vram 15.5GiB
    """
    if unit is None and not command:
        options = {"model": model, "layers": layers}
        flags = {"memory_ratio": memory_ratio, "max_prefill_length": max_prefill_length}
        _estimate_reference(options | flags, _card(vram, gpu, capability), margin, timeout, report, as_json)
        return
    if layers is not None:
        raise click.UsageError("--layers is the reference engine's; an engine has the layers of its model")
    if unit is not None:
        # What is given here is meant from here; the unit has a directory of its own.
        report = report.absolute() if report is not None else None
        model = str(Path(model).absolute()) if model is not None and Path(model).exists() else model
        command = enter_unit(unit, command)
    arguments = serve_arguments(command)
    for flag, value in (("--model", model), ("--memory-ratio", memory_ratio)):
        if value is not None:
            arguments += [flag, str(value)]
    if max_prefill_length is not None:
        arguments += ["--max-prefill-length", str(max_prefill_length)]
    if "--model" not in " ".join(arguments):
        raise click.UsageError("the command line names no model; add --model DIR")
    _need_engine()
    # Before the first import of what reads them.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TQDM_DISABLE="1")
    card = _card(vram, gpu, capability)

    from engine_hooks.freetoken.virtual import estimate_serve

    _finish(
        lambda settings: estimate_serve(arguments, card, settings, verbose=verbose), margin, timeout, report, as_json
    )


def _estimate_reference(
    options: dict[str, Any],
    card: Card,
    margin: int | None,
    timeout: float | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """The reference engine on ``card``."""
    from prefill_probe.reference import estimate_reference

    given = {name: value for name, value in options.items() if value is not None}
    _finish(lambda settings: estimate_reference(card, settings, **given), margin, timeout, report, as_json)


def _finish(
    run: Callable[[ProbeSettings], ProbeRecord],
    margin: int | None,
    timeout: float | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Run the probe, write and print its record, and end with its status."""
    from prefill_probe.record import write_record
    from prefill_probe.render.screen import screen, terminal_width
    from prefill_probe.render.text import error_for
    from prefill_probe.settings import ProbeSettings
    from prefill_probe.virtual.errors import MissingError, ModelError, StartError, StartFault, UntraceableError

    settings = ProbeSettings(margin_bytes=margin, timeout_seconds=timeout or ProbeSettings.timeout_seconds)
    try:
        record = run(settings)
    except (MissingError, ModelError, StartError, StartFault, UntraceableError) as error:
        click.echo(f"prefill-probe estimate: {error}", err=True)
        raise SystemExit(error.exit_status) from None
    if report is not None:
        try:
            write_record(record, report)
        except OSError as error:
            raise click.UsageError(f"--report {report}: {error.strerror}") from None
    stopped_by = error_for(record)
    if as_json:
        click.echo(record.to_json(), nl=False)
    else:
        click.echo(screen(record, terminal_width()), color=False if os.environ.get("NO_COLOR") else None)
    if stopped_by is not None:
        raise SystemExit(stopped_by.exit_status)


def _card(vram: int | None, gpu: str | None, capability: tuple[int, int] | None) -> Card:
    """The card that is asked for.

    Raises:
        click.UsageError: none, or two at once, or one that is not known.
    """
    from dataclasses import replace

    from prefill_probe.virtual.cards import card_named, card_of

    if gpu is None and vram is None:
        raise click.UsageError("say which GPU: --vram 15.5GiB, or --gpu with one of its names")
    if gpu is None:
        assert vram is not None
        return card_of(vram, capability or (12, 0))
    try:
        card = card_named(gpu)
    except ValueError as error:
        raise click.UsageError(f"--gpu: {error}") from None
    if vram is not None:
        card = replace(card, total_bytes=max(card.total_bytes, vram), usable_bytes=vram)
    return replace(card, capability=capability) if capability is not None else card


def _need_engine() -> None:
    from importlib.util import find_spec

    if find_spec("freetoken") is None:
        click.echo("prefill-probe estimate: FreeToken is not installed in this environment", err=True)
        raise SystemExit(EX_UNAVAILABLE)
