"""What a start of FreeToken will need and have: the program of the preflight's child process."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefill_probe import driver
from prefill_probe.preflight import Prediction, Unpredicted, answer

if TYPE_CHECKING:
    from engine_hooks.freetoken.engine import FreeTokenEngine
    from prefill_probe.virtual.device import Card

# Until one does not fit: what a prompt shorter than the pools meets, then what the longest and what many meet.
_SHAPES = ("full", "deep", "packed")


def main() -> None:
    """Answer the server."""
    answer(_predict)


def _predict(request: tuple[bytes, str, Mapping[str, int]]) -> Prediction:
    pickled, which, free = request
    try:
        card = driver.card_at(which, free)
    except OSError as error:
        raise Unpredicted(f"no CUDA GPU answers: {error}", quiet=True) from None
    return predicted(pickled, card)


def predicted(pickled: bytes, card: Card) -> Prediction:
    """What a start with a ``ServerArgs`` on ``card`` will need and have.

    The engine starts on a virtual GPU like ``card``, which gives the headroom. Then that gets all the room that a
    chunk may want, so that one run tells the need.

    Raises:
        Unpredicted: it does not start there, or cannot be traced.
    """
    from prefill_probe._walk import Walk
    from prefill_probe.settings import ProbeSettings
    from prefill_probe.virtual import virtual_gpu
    from prefill_probe.virtual.errors import StartError, StartFault, UntraceableError

    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()), virtual_gpu(card) as device, _booted(pickled) as engine:
            engine.meter.timed = False
            settings = ProbeSettings(shapes=_SHAPES)
            walk = Walk(engine, settings, progress=lambda text: None, left_alone=lambda: None)
            headroom = walk.before.headroom_bytes
            device.make_room()
            need, shape = 0, ""
            for family in walk.families:
                walk.run(family, walk.tokens, cold=True)
                run = walk.runs[-1]
                if run.fault is not None:
                    raise Unpredicted(f"{run.shape.name}: {run.fault.text}")
                if run.measured.peak.allocated_bytes > need:
                    need, shape = run.measured.peak.allocated_bytes, run.shape.name
                if need > headroom:
                    break
            return Prediction(card.name, card.usable_bytes, card.total_bytes, walk.tokens, shape, need, headroom)
    except (StartError, StartFault, UntraceableError) as error:
        raise Unpredicted(str(error)) from None


@contextlib.contextmanager
def _booted(pickled: bytes) -> Iterator[FreeTokenEngine]:
    """The engine, which is imported only now: it has had the virtual GPU from the beginning."""
    from engine_hooks.freetoken.virtual import booted

    config: Any = pickle.loads(pickled)
    # This is its only GPU, whatever the real one was chosen by.
    chosen = {name: value for name, value in (("gpu", ()), ("gpu_assigned", None)) if hasattr(config, name)}
    with booted(replace(config, **chosen)) as engine:
        yield engine
