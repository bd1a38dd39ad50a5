"""What it costs a warm chunk to be watched: pairs in one process; one JSON line a chunk size on standard output.

history.py MODEL CHUNK,CHUNK,...     (on a machine with a CUDA GPU and FreeToken)
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from typing import Any

# Turns of a chunk size, each of one run of every kind; fewer where they take longer than this together.
TURNS, SECONDS = 15, 15.0
# Above this share of a chunk's time the history is to be off by default.
ALLOWED = 0.05
KINDS = ("plain", "history", "watched")


def measured(engine: Any, shape: Any, kind: str) -> Any:
    """One run as the probe makes them: alone, with the allocator's history, and with all that it notes of a chunk."""
    idle = engine.meter.read()
    with contextlib.ExitStack() as watching:
        if kind != "plain":
            watching.enter_context(engine.meter.trace())
        if kind == "watched":
            watching.enter_context(engine.layers())
            watching.enter_context(engine.observe())
        with engine.meter.measure(idle) as one:
            engine.run(shape)
    return one


def paired(engine: Any, shape: Any, turns: int = TURNS) -> dict[str, Any]:
    """Seconds and peaks of ``shape`` by kind, in turn; the overheads are medians over the turns' own ratios."""
    for kind in (*KINDS, "plain"):  # what is loaded once, by the chunk or by watching it
        measured(engine, shape, kind)
    runs: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    end = time.monotonic() + SECONDS
    while len(runs["plain"]) < turns and (time.monotonic() < end or len(runs["plain"]) < 3):
        # No kind is always the first after another.
        first = len(runs["plain"]) % len(KINDS)
        for kind in KINDS[first:] + KINDS[:first]:
            runs[kind].append(measured(engine, shape, kind))
    seconds = {kind: [one.seconds for one in each] for kind, each in runs.items()}
    plain = seconds["plain"]
    overheads = {
        kind: statistics.median(with_it / without - 1 for with_it, without in zip(seconds[kind], plain, strict=True))
        for kind in KINDS[1:]
    }
    peaks = {kind: max(one.peak.allocated_bytes for one in each) for kind, each in runs.items()}
    return {
        "tokens": shape.new_tokens,
        "turns": len(plain),
        "seconds": {kind: round(statistics.median(each), 4) for kind, each in seconds.items()},
        "overhead": {kind: round(share, 4) for kind, share in overheads.items()},
        "spread_of_plain": round(max(plain) / min(plain) - 1, 3),
        "allocated_bytes": peaks,
        "ok": overheads["history"] <= ALLOWED and len(set(peaks.values())) == 1,
    }


def main() -> None:
    from traffic import FLAGS, as_started
    from truth import real_engine

    from prefill_probe.shape import full_chunk

    chunks = [int(text) for text in sys.argv[2].split(",")]
    arguments = ["--model", sys.argv[1], "--max-running-requests", "1", "--cuda-graph-max-bs", "1", *FLAGS]
    arguments += ["--max-prefill-length", str(max(chunks)), "--num-tokens", str(16 * max(chunks))]
    with real_engine(arguments, None) as (engine, _):
        for chunk in chunks:
            engine = as_started(engine, chunk)
            print(json.dumps(paired(engine, full_chunk(engine.limits()))), flush=True)


if __name__ == "__main__":
    main()
