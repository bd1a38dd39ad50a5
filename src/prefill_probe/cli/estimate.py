"""``prefill-probe estimate``: an engine command line, tried on a virtual GPU."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from prefill_probe.cli.options import Checked, Given, end, finish, with_options
from prefill_probe.faults import EX_UNAVAILABLE
from prefill_probe.sizes import parse_size

if TYPE_CHECKING:
    from prefill_probe.record import ProbeRecord
    from prefill_probe.virtual.device import Card

LARGEST_VRAM = 10 << 40
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")


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


@click.command()
@click.option("--vram", type=Checked("size", _vram), help="Memory of the GPU, such as 15.5GiB, all of it usable.")
@click.option("--gpu", metavar="NAME", help='A card by name, such as "RTX 5080".')
@click.option("--capability", type=Checked("x.y", _capability), help="Compute capability.  [default: 12.0]")
@with_options
def estimate(vram: int | None, gpu: str | None, capability: tuple[int, int] | None, **options: Any) -> None:
    """Try an engine command line on a virtual GPU: no GPU is needed, and no weights are read.

    With no command after -- it tries the built-in reference engine.
    Ends with 0 (fits), 78 (does not fit), 75 (cannot be traced), 2 (bad usage).

    \b
    Example:
      prefill-probe estimate --vram 15.5GiB -- ft serve --model DIR --memory-ratio 0.95
      prefill-probe estimate --vram 15.5GiB
    """
    given = Given(**options)
    run = _engine if given.command else _reference
    from prefill_probe.virtual.errors import MissingError, ModelError, StartError, StartFault, UntraceableError

    try:
        record = run(given, vram, gpu, capability)
    except (MissingError, ModelError, StartError, StartFault, UntraceableError) as error:
        end("estimate", error.exit_status, str(error))
    finish(record, given, given.report)


def _reference(given: Given, *card: Any) -> ProbeRecord:
    from prefill_probe.reference import estimate_reference

    return estimate_reference(_card(*card), given.settings, **given.for_reference)


def _engine(given: Given, *card: Any) -> ProbeRecord:
    arguments = given.arguments
    if given.layers is not None:
        raise click.UsageError("--layers: an estimate of an engine has all layers, and takes seconds all the same")
    if find_spec("freetoken") is None:
        end("estimate", EX_UNAVAILABLE, "FreeToken is not installed in this environment")
    # Before the first import of what reads them.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TQDM_DISABLE="1")
    found = _card(*card)
    from engine_hooks.freetoken.virtual import estimate_serve

    return estimate_serve(arguments, found, given.settings, verbose=given.verbose)


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
