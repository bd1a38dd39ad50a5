"""What the guard costs a prefill pass: prompts with it and without it, in turn; one JSON line on standard output.

passes.py MODEL CHUNK [--virtual]     (on a machine with FreeToken, and a CUDA GPU unless virtual)
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from traffic import FLAGS
from truth import Clients, real_engine, virtual_engine

# Turns, each of a prompt of so many chunks with the guard and of one without it.
TURNS, CHUNKS = 12, 5
# Of a full chunk's warm time, by pass.
ALLOWED = 0.001
RUNNING = 4


class Stopwatch:
    """A function, and the seconds of each of its calls."""

    def __init__(self, call: Any) -> None:
        self.seconds: list[float] = []
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._call(*arguments)
        finally:
            self.seconds.append(time.perf_counter() - began)


def cost(engine: Any) -> dict[str, Any]:
    """Seconds that the guard adds to a pass, and those of prompts with it and without it."""
    import torch

    from engine_hooks.freetoken.guard import Guard
    from prefill_probe import ProbeSettings, probe
    from prefill_probe.guard import needs_of

    record = probe(engine, ProbeSettings(guard=True))
    needs = needs_of(record)
    assert needs is not None
    chunk = record.chunk.effective
    scheduler = engine._scheduler
    manager = scheduler.prefill_manager
    inner = Stopwatch(manager.schedule_next_batch)
    manager.schedule_next_batch = inner
    Guard(engine, needs, on_miss=lambda text: None).attach(scheduler)
    outer = Stopwatch(manager.schedule_next_batch)
    clients = Clients(scheduler, engine.limits(), chunk)
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    added: list[float] = []
    with torch.inference_mode():
        for turn in range(TURNS + 1):
            for kind in ("on", "off") if turn % 2 else ("off", "on"):
                manager.schedule_next_batch = outer if kind == "on" else inner
                inner.seconds.clear(), outer.seconds.clear()
                began = time.perf_counter()
                clients._serve([clients._prompt(CHUNKS * chunk)], 1)
                torch.cuda.synchronize()
                if turn:  # the first is warm-up
                    seconds[kind].append(time.perf_counter() - began)
                    if kind == "on":
                        # Calls with a prompt waiting, one a chunk: they come first, the others ask for nothing.
                        calls = zip(outer.seconds[:CHUNKS], inner.seconds[:CHUNKS], strict=True)
                        added += [around - within for around, within in calls]
    warm = statistics.median(seconds["off"]) / CHUNKS
    return {
        "chunk": chunk,
        "passes": len(added),
        "added_microseconds": {
            "median": round(statistics.median(added) * 1e6, 1),
            "mean": round(statistics.fmean(added) * 1e6, 1),
            "max": round(max(added) * 1e6, 1),
        },
        "chunk_seconds": round(warm, 5),
        "added_over_chunk": round(statistics.fmean(added) / warm, 6),
        "prompt_seconds": {kind: [round(each, 4) for each in found] for kind, found in seconds.items()},
        "speed_on_over_off": round(
            statistics.median(off / on for on, off in zip(seconds["on"], seconds["off"], strict=True)), 4
        ),
        "ok": statistics.fmean(added) <= ALLOWED * warm,
    }


def main() -> None:
    model, chunk, virtual = sys.argv[1], int(sys.argv[2]), "--virtual" in sys.argv[3:]
    arguments = ["--model", model, "--max-running-requests", str(RUNNING), "--cuda-graph-max-bs", str(RUNNING), *FLAGS]
    arguments += ["--max-prefill-length", str(chunk), "--num-tokens", str(16 * chunk)]
    with (virtual_engine if virtual else real_engine)(arguments, None) as (engine, _):
        print(json.dumps(cost(engine)), flush=True)


if __name__ == "__main__":
    main()
