"""The reference engine on virtual GPUs; one JSON document on standard output.

A process of its own: the kernels' library is imported to stay, and believes in the GPU that it meets first.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefill_probe import PlanRefused, ProbeSettings, probe
from prefill_probe.adapt import Memory, adapted_probe
from prefill_probe.engine import ShapeRefused
from prefill_probe.reference import booted_reference
from prefill_probe.settings import Mode
from prefill_probe.shape import FAMILIES, Sequence, Shape
from prefill_probe.virtual import virtual_gpu
from prefill_probe.virtual.cards import card_of

GIB = 1 << 30
EVERY = ("full", "first", "deep", "packed", "prefix", "decode")
PLACES = 12


@contextlib.contextmanager
def booted(size: float, **flags: Any) -> Iterator[tuple[Any, Any]]:
    with virtual_gpu(card_of(int(size * GIB), (9, 0))) as device:
        engine = booted_reference(**flags)
        engine.meter.timed = False
        yield engine, device


def left(engine: Any) -> dict[str, Any]:
    """What a run could leave behind."""
    import torch

    torch.cuda.empty_cache()
    return {
        "pages": list(engine._kv.free),
        "slots": list(engine._states.free),
        "budget": engine.limits().budget,
        "graph": id(engine._graph),
        "rng": torch.get_rng_state().tolist(),
        "allocated": torch.cuda.memory_allocated() // 65536,
    }


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def every_shape() -> dict[str, Any]:
    with booted(24, max_prefill_length=1024) as (engine, device):
        probe(engine, ProbeSettings(shapes=EVERY))
        before = left(engine)
        record = probe(engine, ProbeSettings(shapes=EVERY))
        found: dict[str, Any] = {
            "verdict": record.verdict,
            "notes": record.notes,
            "runs": {run.name: [run.sequences, run.new_tokens, run.cached_tokens] for run in record.shapes},
            "layers": [list(run.timeline.layers) for run in record.shapes if run.timeline],
            "changed": differing(before, left(engine)),
            "refused": refused(engine),
            "failures": failures(engine, device, before),
        }
    return found


def refused(engine: Any) -> list[str]:
    """Shapes that no scheduler would issue."""
    shapes = [
        Shape("too many", tuple(Sequence(0, 64) for _ in range(5))),
        Shape("too long", (Sequence(262_144, 64),)),
        Shape("no room", tuple(Sequence(0, 64) for _ in range(2)), decodes=3),
    ]
    said = []
    for shape in shapes:
        try:
            engine.run(shape)
        except ShapeRefused:
            said.append(shape.name)
    return said


def failures(engine: Any, device: Any, before: dict[str, Any]) -> dict[str, Any]:
    """By shape: how many places failed, the components that were named, and what was not as before."""
    import torch

    allocate = device.allocate
    found: dict[str, Any] = {}
    for family in FAMILIES:
        if family.word not in ("deep", "packed"):
            continue
        shape = family.shape(engine.limits(), 1024, 1024)
        count = allocations(engine, device, shape)
        failed, named, changed = 0, set(), []
        for at in range(1, count, max(1, count // PLACES)):
            calls = [0]

            def refuse(size: int, calls: list[int] = calls, at: int = at) -> Any:
                calls[0] += 1
                if calls[0] == at:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 MiB.")
                return allocate(size)

            device.allocate = refuse
            try:
                engine.run(shape)
            except torch.OutOfMemoryError as error:
                failed += 1
                named.add(engine.site(error).partition(" ")[0])
            finally:
                device.allocate = allocate
            changed += differing(before, left(engine))
        found[family.word] = {"failed": failed, "named": sorted(named), "changed": changed}
    return found


def allocations(engine: Any, device: Any, shape: Any) -> int:
    allocate, calls = device.allocate, [0]

    def counting(size: int) -> Any:
        calls[0] += 1
        return allocate(size)

    device.allocate = counting
    try:
        engine.run(shape)
    finally:
        device.allocate = allocate
    return calls[0]


def incident() -> dict[str, Any]:
    with booted(15.5) as (engine, _device):
        at_start = engine.plan(0.95)
        before = left(engine)
        record = probe(engine, ProbeSettings())
        after = left(engine)
        pages = before.pop("pages"), after.pop("pages")
        before.pop("graph"), after.pop("graph")
        try:
            engine.plan(0.2)
            refusal = ""
        except PlanRefused as error:
            refusal = str(error)
        return {
            "record": json.loads(record.to_json()),
            "changed": differing(before, after) + (["pages"] if pages[0] != pages[1] else []),
            "pool": [at_start.kv_tokens, engine.plan(0.9).kv_tokens, at_start.pool_bytes],
            "page_tokens": engine.limits().page_tokens,
            "refusal": refusal,
        }


def adapted(mode: Mode, directory: str) -> list[Any]:
    found = []
    for _ in range(2):  # a start, and the next one
        with booted(15.5) as (engine, _device):
            memory = Memory(Path(directory) / f"{mode.value}.json")
            record = adapted_probe(engine, ProbeSettings(mode=mode), memory)
            found.append([record.adapted, engine.limits().budget, engine.limits().kv_pages, len(record.shapes)])
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        print(
            json.dumps(
                {
                    "freetoken": "freetoken" in sys.modules,
                    "every shape": every_shape(),
                    "incident": incident(),
                    "adapt": adapted(Mode.ADAPT, directory),
                    "adapt-kv": adapted(Mode.ADAPT_KV, directory),
                }
            )
        )


if __name__ == "__main__":
    main()
