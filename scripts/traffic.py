"""One engine, many chunks: probe, then real traffic in the same process; one JSON line a row on standard output.

traffic.py ORDER     ORDER is a JSON object, see ``_traffic`` in acceptance.

Once it has imported what it needs it waits for a line on standard input; before that it does not touch the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from truth import Clients, burst_lengths, forget_requests, real_engine, virtual_engine

FLAGS = ["--moe-cache-size", "512", "--disable-moe-prefill-overlap", "--dummy-weight", "--text-model-only"]
# The kind that meets what the one before it left in the allocator's cache; the others meet what a start leaves.
ON_TOP = "during decode, nothing handed back before"


class Traffic(Clients):
    """The kinds of requests that are served, each several chunks of work."""

    def kinds(self) -> dict[str, Callable[[], None]]:
        chunk, several = self._chunk, max(2, self._limits.max_sequences)
        shared = self._prompt(chunk)
        deep = min(98_304, 12 * chunk, self._longest)

        def one_by_one(*lengths: int) -> None:
            for length in lengths:
                self._serve([self._prompt(length)], 2)

        def after_prefix() -> None:
            for _ in range(2):
                self._serve([self._joined(shared, chunk)], 2)

        def during_decode() -> None:
            self._serve([self._prompt(chunk // 2 + 64 * (number % 8)) for number in range(2 * several)], 24)

        return {
            "long": lambda: self._serve([self._prompt(3 * chunk)], 4),
            "deep": lambda: one_by_one(deep),
            "many short": lambda: self._serve(list(map(self._prompt, burst_lengths(chunk, several))), 4),
            "prefix hits": after_prefix,
            "during decode": during_decode,
            "short and long": lambda: one_by_one(16, 300, 2 * chunk, 65, 2 * chunk),
            ON_TOP: during_decode,
        }

    def _joined(self, prefix: Any, tokens: int) -> Any:
        import torch

        return torch.cat([prefix, self._prompt(tokens)])


def as_started(engine: Any, chunk: int) -> Any:
    """The engine as a start with this chunk leaves it: an empty prefix tree, and a list of free pages of its own."""
    from engine_hooks.freetoken.engine import FreeTokenEngine

    scheduler, noted, meter = engine._scheduler, engine._planner._noted, engine.meter
    forget_requests(scheduler)
    noted.given["max_extend_tokens"] = chunk
    engine.adopt_chunk(chunk)
    scheduler.cache_manager.free_slots = None
    meter.release()
    scheduler.cache_manager.rebuild(scheduler.engine.num_pages, scheduler.engine.page_table)
    fresh = FreeTokenEngine(scheduler, noted)
    fresh.meter.timed = meter.timed
    return fresh


def row_of(engine: Any, beside: Any, chunk: int) -> dict[str, Any]:
    """The need in the record, and what each kind of traffic took over the idle engine that the probe left."""
    import torch

    from prefill_probe import ProbeSettings, probe

    record = probe(engine, ProbeSettings())
    shapes = json.loads(record.to_json())["shapes"]
    idle = engine.meter.read()
    seen = {}
    with torch.inference_mode():
        for name, serve in Traffic(engine._scheduler, engine.limits(), chunk).kinds().items():
            if name != ON_TOP:
                engine.meter.release()
            with contextlib.suppress(AttributeError):  # nobody samples a virtual GPU
                beside.reset()
            with engine.meter.measure(idle) as measured:
                serve()
            seen[name] = asdict(measured.peak)
            with contextlib.suppress(AttributeError):
                seen[name]["sampled_device_bytes"] = idle.free_bytes - beside.lowest()
    engine._scheduler.cache_manager.check_integrity()
    return {
        "chunk": chunk,
        "verdict": record.verdict,
        "need": asdict(record.need) if record.need else None,
        "shapes": [{name: value for name, value in run.items() if name != "timeline"} for run in shapes],
        "probe_seconds": record.timings["probe_seconds"],
        "seen": seen,
    }


def main() -> None:
    import freetoken.scheduler  # noqa: F401  (the longest of a start's imports)

    order, out = json.loads(sys.argv[1]), sys.stdout
    sys.stdin.readline()
    running, pool = order["running"], order["pool"]
    arguments = ["--model", order["model"], "--max-running-requests", str(running), "--num-tokens", str(pool), *FLAGS]
    arguments += ["--cuda-graph-max-bs", str(min(4, running)), "--max-prefill-length", str(max(order["chunks"]))]
    arguments += ["--port", str(20_000 + os.getpid() % 20_000)]
    with (virtual_engine if order["virtual"] else real_engine)(arguments, None) as (engine, beside):
        for chunk in order["chunks"]:
            engine = as_started(engine, chunk)
            row = {"max_running": running, "pool_tokens": pool} | row_of(engine, beside, chunk)
            print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    main()
