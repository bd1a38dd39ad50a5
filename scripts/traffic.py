"""One engine, many chunks: probe, then real traffic in the same process; one JSON line a row on standard output.

traffic.py MODEL MAX_RUNNING CHUNK,CHUNK,... POOL      POOL: tokens of the KV pool; 0: half of what the card has

Once it has imported what it needs it waits for a line on standard input; before that it does not touch the GPU.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

from generate import build, tame
from machine import Ballast
from truth import burst_lengths


def booted(model: str, running: int, chunk: int, pool: int) -> tuple[Any, Any, Any]:
    """An engine whose own probe was put off, what its planner was asked, and its allocator's peaks."""
    os.environ["PREFILL_PROBE"] = "warn"
    from engine_hooks.freetoken import boot

    kept: list[Any] = []
    boot._probe = lambda scheduler, noted, peaks, settings: kept.extend((noted, peaks))  # type: ignore[assignment]
    changes: dict[str, Any] = {"num_token_override": pool} if pool else {"memory_ratio": 0.5}
    llm = build(model, chunk, max_running_req=running, cuda_graph_max_bs=min(running, 4), **changes)
    return llm, kept[0], kept[1]


# The kind that meets what the one before it left in the allocator's cache; the others meet what a start leaves.
ON_TOP = "during decode, nothing handed back before"


class Traffic:
    """Requests as clients send them, with random prompts that no earlier one began with."""

    def __init__(self, llm: Any, running: int) -> None:
        self._llm = llm
        self._running = running
        self._pick = random.Random(11)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._pick.randrange(2, 32000) for _ in range(tokens)]

    def _serve(self, prompts: list[list[int]], tokens: int) -> None:
        from freetoken.core import SamplingParams

        self._llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))

    def kinds(self, chunk: int) -> dict[str, Any]:
        """What is served, by name."""
        shared = self._prompt(chunk)
        several = max(2, self._running)
        packed = burst_lengths(chunk, several)
        mixed = (16, 300, 2 * chunk, 65, 2 * chunk)

        def during_decode() -> None:
            self._serve([self._prompt(chunk // 2 + 64 * n) for n in range(2 * several)], 24)

        return {
            "long": lambda: self._serve([self._prompt(3 * chunk)], 4),
            "deep": lambda: self._serve([self._prompt(min(98_304, 12 * chunk))], 2),
            "many short": lambda: self._serve([self._prompt(length) for length in packed], 4),
            "prefix hits": lambda: [self._serve([shared + self._prompt(chunk)], 2) for _ in range(2)],
            "during decode": during_decode,
            "short and long": lambda: [self._serve([self._prompt(tokens)], 2) for tokens in mixed],
            ON_TOP: during_decode,
        }


def main() -> None:
    import freetoken.llm  # noqa: F401  (the longest of a start's imports)
    import torch

    from engine_hooks.freetoken.engine import FreeTokenEngine
    from prefill_probe import ProbeSettings, probe

    sys.stdin.readline()
    model, running = sys.argv[1], int(sys.argv[2])
    chunks = [int(text) for text in sys.argv[3].split(",")]
    watcher = Ballast(0)
    llm, noted, peaks = booted(model, running, max(chunks), int(sys.argv[4]))
    with torch.inference_mode():
        tame(llm)
    for chunk in chunks:
        llm.prefill_budget = noted.given["max_extend_tokens"] = chunk
        llm.cache_manager.rebuild(llm.engine.num_pages, llm.engine.page_table)
        engine = FreeTokenEngine(llm, noted, peaks)
        record = probe(engine, ProbeSettings())
        seen = {}
        idle = engine.meter.read()
        with torch.inference_mode():
            for name, serve in Traffic(llm, running).kinds(chunk).items():
                if name != ON_TOP:
                    engine.meter.release()
                watcher.reset()
                with engine.meter.measure(idle) as measured:
                    serve()
                seen[name] = vars(measured.peak) | {"sampled_device_bytes": idle.free_bytes - watcher.lowest()}
        row = {
            "chunk": chunk,
            "max_running": running,
            "pool_tokens": llm.engine.num_pages * llm.cache_manager.page_size,
            "verdict": record.verdict,
            "need": vars(record.need) if record.need else None,
            "shapes": json.loads(record.to_json())["shapes"],
            "probe_seconds": record.timings["probe_seconds"],
            "seen": seen,
        }
        print(json.dumps(row), flush=True)
        llm.cache_manager.check_integrity()
    watcher.close()


if __name__ == "__main__":
    main()
