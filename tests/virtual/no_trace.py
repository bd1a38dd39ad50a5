"""The hook's engine over the real scheduler on a virtual GPU: what every shape, and an OOM anywhere, leaves behind.

no_trace.py MODEL     One JSON document on standard output. A process of its own: the engine is imported to stay.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from engine_digest import differing, digest

SHAPES = ("full", "first", "deep", "packed", "prefix", "decode")
# One sequence with a history beside decodes, and many without: between them every path through the scheduler.
FAILING = ("deep", "packed")
PLACES = 10


def main() -> None:
    from engine_hooks.freetoken import virtual
    from prefill_probe import ProbeSettings, probe
    from prefill_probe.shape import FAMILIES
    from prefill_probe.virtual import virtual_gpu
    from prefill_probe.virtual.cards import card_of

    logging.disable(logging.WARNING)
    serve = [
        "--model",
        sys.argv[1],
        "--max-running-requests",
        "4",
        "--cuda-graph-max-bs",
        "2",
        "--moe-cache-size",
        "512",
    ]
    serve += [
        "--disable-moe-prefill-overlap",
        "--memory-ratio",
        "0.8",
        "--max-prefill-length",
        "1024",
        "--dummy-weight",
    ]
    with virtual_gpu(card_of(24 << 30, (9, 0))) as device:
        config = virtual.parsed([*serve, "--text-model-only"])
        with virtual.booted(config) as engine:
            scheduler = engine._scheduler
            record = probe(engine, ProbeSettings(shapes=SHAPES))
            before = digest(scheduler)
            found: dict[str, Any] = {"verdict": record.verdict, "notes": record.notes, "changed": {}, "places": {}}
            found["runs"] = [[run.name, run.sequences, run.cached_tokens, run.outcome] for run in record.shapes]
            probe(engine, ProbeSettings(shapes=SHAPES))
            found["changed"]["probe"] = differing(before, digest(scheduler))
            allocate = device.allocate
            for family in FAMILIES:
                if family.word not in FAILING:
                    continue
                shape = family.shape(engine.limits(), 1024, 1024)
                assert shape is not None, family
                for at, place in places(engine, shape, device, allocate):
                    failed = fail_at(engine, shape, device, allocate, at)
                    found["places"].setdefault(family.word, []).append([place, failed])
                    found["changed"][f"{family.word} {place}"] = differing(before, digest(scheduler))
            found["changed"]["after all"] = differing(before, digest(scheduler))
    print(json.dumps(found))


def places(engine: Any, shape: Any, device: Any, allocate: Any) -> list[tuple[int, str]]:
    """Allocations, by number, of ten places of the engine, spread over all that there are."""
    seen: dict[str, int] = {}
    calls = [0]

    def note(size: int) -> Any:
        calls[0] += 1
        frame = sys._getframe()
        while frame and ("/freetoken/" not in frame.f_code.co_filename or "engine_hooks" in frame.f_code.co_filename):
            frame = frame.f_back
        if frame:
            seen.setdefault(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}", calls[0])
        return allocate(size)

    device.allocate = note
    try:
        engine.run(shape)
    finally:
        device.allocate = allocate
    every = [(number, place) for place, number in seen.items()]
    return [every[(len(every) - 1) * step // (PLACES - 1)] for step in range(PLACES)]


def fail_at(engine: Any, shape: Any, device: Any, allocate: Any, at: int) -> bool:
    """Whether the run failed with the error that its allocation number ``at`` raised."""
    import torch

    calls = [0]

    def refuse(size: int) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 MiB.")
        return allocate(size)

    device.allocate = refuse
    try:
        engine.run(shape)
    except torch.OutOfMemoryError:
        return True
    finally:
        device.allocate = allocate
    return False


if __name__ == "__main__":
    main()
