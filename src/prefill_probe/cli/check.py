"""``prefill-probe check``: an engine command line, tried on this machine's GPU."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from prefill_probe import driver
from prefill_probe.cli.engine_command import program
from prefill_probe.cli.options import Given, end, finish, with_options
from prefill_probe.faults import EX_SOFTWARE, EX_UNAVAILABLE
from prefill_probe.sizes import parse_size

if TYPE_CHECKING:
    from prefill_probe.record import ProbeRecord

_DOING = {
    "plan": "planning for all layers",
    "load": "loading weights",
    "caches": "making caches",
    "graphs": "capturing CUDA graphs",
    "chunk": "running chunks",
    "verdict": "done",
}


@click.command()
@click.option("--no-weights", is_flag=True, help="Dummy weights: no checkpoint is read.")
@with_options
def check(no_weights: bool, **options: Any) -> None:
    """Start an engine command line on this machine's GPU, up to the probe, and end it: it answers nobody.

    With no command after -- it runs the built-in reference engine. --layers N makes a check of a large model short: its
    first N layers are run, with dummy weights, and what all of them hold is planned on a virtual GPU.
    Ends with 0 (fits), 78 (does not fit), 75 (try again), 70 (a fault), 69 (no GPU or no engine), 2 (bad usage).

    \b
    Example:
      prefill-probe check -- ft serve --model DIR --max-prefill-length 8192
      prefill-probe check --layers 4 -- ft serve --model DIR
      prefill-probe check --unit freetoken.service
      prefill-probe check
    """
    given = Given(**options)
    arguments = given.arguments if given.command else []
    if no_weights and not given.command:
        raise click.UsageError("--no-weights: the reference engine has no others")
    if given.command:
        _need_model(arguments, here=given.layers is not None)
    _need_gpu()
    line = _Line()
    try:
        record = _engine(given, arguments, no_weights, line) if given.command else _reference(given, line)
    except KeyboardInterrupt:
        line.clear()
        end("check", 130, "interrupted; nothing of the start is left")
    finally:
        line.clear()
    from prefill_probe.record import default_report

    finish(record, given, given.report or default_report(os.environ))


def _engine(given: Given, arguments: list[str], no_weights: bool, line: _Line) -> ProbeRecord:
    if given.layers is not None:
        return _first_layers(given, given.layers, arguments, line)
    return _started(given, [*arguments, *(["--dummy-weight"] if no_weights else [])], given.margin, line)


def _first_layers(given: Given, layers: int, arguments: list[str], line: _Line) -> ProbeRecord:
    """A start with the model's first layers, judged by what a start with all of them holds."""
    from prefill_probe.cli.full_depth import full_depth
    from prefill_probe.depth import at_full_depth, points
    from prefill_probe.settings import ProbeSettings

    settings = ProbeSettings(margin_bytes=_margin(given, arguments))
    if find_spec("freetoken") is None:
        end("check", EX_UNAVAILABLE, "FreeToken is not installed in this environment, and --layers plans with it")
    line.show("plan", "")
    try:
        card = driver.card_here()
    except OSError as error:
        end("check", EX_UNAVAILABLE, str(error))
    with (
        TemporaryDirectory(prefix="prefill-probe-") as directory,
        full_depth(arguments, layers, Path(directory), card, os.environ) as depth,
    ):
        # Half a chunk is run only where the margin is not left, and a slope is wanted. Where running out does harm,
        # smaller chunks are run anyway, and the margin is kept.
        margin = settings.margin_bytes if card.integrated else card.total_bytes
        run = _started(given, [*depth.start, "--prefill-probe", "enforce"], margin, line)
        if run.chunk != depth.plan.chunk:
            ours, all_ = run.chunk.effective, depth.plan.chunk.effective
            text = f"--layers {layers}: its chunks have {ours} tokens, those of all layers {all_}; check it without"
            end("check", EX_SOFTWARE, text)
        record = at_full_depth(run, depth.plan, layers, settings, ratio_governs=depth.ratio_governs)
        if record.verdict in ("tight", "does-not-fit"):
            record = replace(record, advice=depth.advice(record, points(run)))
    return record


def _margin(given: Given, arguments: list[str]) -> int | None:
    """What is given here, or deployed.

    Raises:
        click.UsageError: what is deployed is no size.
    """
    text = _value_of("--prefill-probe-margin", arguments) or os.environ.get("PREFILL_PROBE_MARGIN")
    if given.margin is not None or not text:
        return given.margin
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.UsageError(f"--prefill-probe-margin: {error}") from None


def _started(given: Given, arguments: list[str], margin: int | None, line: _Line) -> ProbeRecord:
    from engine_hooks.freetoken.versions import READY
    from prefill_probe.record import RecordError
    from prefill_probe.start import try_start

    with TemporaryDirectory(prefix="prefill-probe-") as directory:
        report = Path(directory) / "record.json"
        arguments, environment = _with_settings(given, report, arguments, margin)
        try:
            tried = try_start(
                [program(given.command[0]), "serve", *arguments],
                environment,
                report=report,
                ready=READY,
                progress=line.show,
                echo=(lambda text: click.echo(text, err=True)) if given.verbose else lambda text: None,
            )
        except (OSError, RecordError) as error:
            line.clear()
            end("check", EX_UNAVAILABLE, str(error))
    line.clear()
    if tried.record is None:
        end("check", *tried.conclusion)
    return tried.record


def _reference(given: Given, line: _Line) -> ProbeRecord:
    from prefill_probe.reference import check_reference
    from prefill_probe.virtual.errors import MissingError, ModelError, StartError

    line.show("load", "")
    try:
        return check_reference(given.settings, progress=lambda text: line.show("chunk", text), **given.for_reference)
    except (MissingError, ModelError, StartError) as error:
        line.clear()
        end("check", error.exit_status, str(error))


def _with_settings(
    given: Given, report: Path, arguments: list[str], margin: int | None
) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment of the start.

    What is given here wins over what is deployed: by flag where the command line has that flag, else by variable. A
    start that is deployed without a check is checked all the same.
    """
    environment = dict(os.environ)
    mode = _value_of("--prefill-probe", arguments) or environment.get("PREFILL_PROBE")
    settings = [
        ("--prefill-probe", "PREFILL_PROBE", "enforce" if mode in ("off", "warn") else None),
        ("--prefill-probe-margin", "PREFILL_PROBE_MARGIN", None if margin is None else f"{margin}B"),
        ("--prefill-probe-timeout", "PREFILL_PROBE_TIMEOUT", None if given.timeout is None else str(given.timeout)),
        ("--prefill-probe-report", "PREFILL_PROBE_REPORT", str(report)),
        ("--prefill-probe-preflight", "PREFILL_PROBE_PREFLIGHT", "off"),  # the chunk itself is about to run
    ]
    for flag, variable, value in settings:
        deployed = _value_of(flag, arguments)
        if value is not None:
            environment[variable] = value
            arguments = [*arguments, *([flag, value] if deployed is not None else [])]
    return arguments, environment


def _value_of(flag: str, arguments: list[str]) -> str | None:
    """The last value of a flag, given as ``--flag value`` or ``--flag=value``."""
    found = None
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _need_model(arguments: list[str], *, here: bool) -> None:
    """End with 2 where the model is not there, before anything is started.

    Args:
        here: its configuration is to be read here; else a hub's name, or what a directory holds, is the engine's.
    """
    from prefill_probe.virtual.errors import ModelError
    from prefill_probe.virtual.model_directory import checked, looks_like_hub_id

    name = _value_of("--model", arguments) or _value_of("--model-path", arguments) or ""
    if not here and (Path(name).expanduser().exists() or looks_like_hub_id(name)):
        return
    try:
        checked(name)
    except ModelError as error:
        end("check", error.exit_status, str(error))


def _need_gpu() -> None:
    """End with 69 where no CUDA GPU answers: the driver is asked, and no context made."""
    if driver.count() == 0:
        end("check", EX_UNAVAILABLE, "no CUDA GPU answers on this machine; `prefill-probe estimate` needs none")


class _Line:
    """What is being done, on standard error: one line that changes on a terminal, else a line a stage."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()
        self._shown = ""

    def show(self, stage: str, text: str) -> None:
        """A new stage, or (``text``) what is done in it."""
        doing = _DOING.get(stage, stage)
        seconds = time.monotonic() - self._began
        if self._live:
            click.echo(f"\r\x1b[2K{seconds:4.0f} s  {doing}{': ' if text else ''}{text}"[:100], nl=False, err=True)
        elif doing != self._shown:
            click.echo(f"{seconds:4.0f} s  {doing}", err=True)
        self._shown = doing

    def clear(self) -> None:
        """Take the live line away."""
        if self._live and self._shown:
            click.echo("\r\x1b[2K", nl=False, err=True)
        self._shown = ""
