"""The guard on the engine's own scheduler, loop and cache on a virtual GPU, beside a neighbour that comes and goes.

guarded.py MODEL     One JSON document on standard output. A process of its own: the engine is imported to stay.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

CHUNK = 1024
SERVE = f"""--max-running-requests 4 --cuda-graph-max-bs 2 --moe-cache-size 512 --disable-moe-prefill-overlap
    --memory-ratio 0.8 --max-prefill-length {CHUNK} --dummy-weight --text-model-only""".split()


class Loop:
    """The scheduler's overlapped loop, a turn at a time, with an inbox and an outbox."""

    def __init__(self, scheduler: Any) -> None:
        self.inbox: list[Any] = []
        self.outbox: list[Any] = []
        self.passes: list[list[int]] = []
        self._scheduler, self._last = scheduler, None
        scheduler.config = replace(scheduler.config, offline_mode=False)
        scheduler.send_result = self.outbox.extend
        scheduler.receive_msg = lambda blocking: [self.inbox.pop(0) for _ in list(self.inbox)]
        self.before_forward: Callable[[], None] = lambda: None
        forward = scheduler._forward

        def noted(forward_input: Any) -> Any:
            if forward_input.batch.is_prefill:
                self.passes.append([int(req.extend_len) for req in forward_input.batch.reqs])
                self.before_forward()
            return forward(forward_input)

        scheduler._forward = noted

    def ask(self, uid: int, tokens: int) -> None:
        from freetoken.core import SamplingParams
        from freetoken.message import UserMsg

        ids = torch.randint(5, 500, (tokens,), generator=torch.Generator().manual_seed(uid), dtype=torch.int32)
        self.inbox.append(
            UserMsg(uid=uid, input_ids=ids, sampling_params=SamplingParams(max_tokens=2, ignore_eos=True))
        )

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            with torch.inference_mode():
                self._last = self._scheduler.overlap_loop(self._last)

    def rest(self) -> None:
        """Turns until nothing waits or runs."""
        scheduler = self._scheduler
        for _ in range(60):
            self.turn()
            if not (self._last or scheduler.prefill_manager.runnable or scheduler.decode_manager.runnable):
                return
        raise RuntimeError("the scheduler does not come to rest")

    def errors(self) -> dict[int, list[str]]:
        """By request: code and text of the error that it got."""
        return {msg.uid: [msg.code, msg.error] for msg in self.outbox if getattr(msg, "error", None)}


def held(scheduler: Any) -> dict[str, Any]:
    """What requests have taken, and the cache's own check of itself."""
    tables, cache = scheduler.table_manager, scheduler.cache_manager
    cache.check_integrity()
    return {
        "rows": sorted(tables._free_slots),
        "pages": cache.available_size,
        "states": cache.mamba_available_size,
        "waiting": len(scheduler.prefill_manager.pending_list),
        "running": len(scheduler.decode_manager.running_reqs),
        "acks": len(scheduler._pending_abort_acks),
    }


def main() -> None:
    from engine_hooks.freetoken import guard as guards
    from engine_hooks.freetoken import virtual
    from prefill_probe import ProbeSettings, probe
    from prefill_probe.guard import needs_of
    from prefill_probe.virtual.cards import card_of

    guards.PATIENCE_SECONDS = 0.0
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        serve = ["--model", sys.argv[1], *SERVE]
        engine, device = stack.enter_context(virtual.started(serve, card_of(24 << 30, (9, 0))))
        neighbour = [0]
        alone = device._free_beside
        device.allocator._device_free = lambda reserved: alone(reserved) - neighbour[0]
        scheduler = engine._scheduler
        needs = needs_of(probe(engine, ProbeSettings(guard=True)))
        assert needs is not None
        misses: list[str] = []
        counts: list[dict[str, int]] = []
        guard = guards.Guard(engine, needs, misses.append, lambda counters: counts.append(dict(vars(counters))))
        loop = Loop(scheduler)
        guard.attach(scheduler)

        def leave(size: int) -> None:
            torch.cuda.empty_cache()
            neighbour[0] = alone(device.allocator.reserved) - size

        loop.ask(1, 300)
        loop.rest()  # what is built once
        before = held(scheduler)

        # A prompt of three chunks, refused while its first one is in flight.
        loop.passes.clear()
        loop.ask(2, 3 * CHUNK)
        loop.turn()
        found["first"] = list(loop.passes)
        leave(0)
        loop.turn(4)
        found["refused"] = loop.errors()
        loop.rest()
        found["after_refusal"] = held(scheduler)

        # There is room for a part of a chunk, then for all of it.
        loop.passes.clear()
        loop.ask(3, 3 * CHUNK)
        leave(needs.at(CHUNK // 2))
        loop.turn()
        found["shrunk"] = list(loop.passes)
        neighbour[0] = 0
        loop.turn()
        found["next_pass"] = loop.passes[len(found["shrunk"]) :]
        loop.rest()

        # All that is free is taken as soon as a chunk has begun.
        def take_all() -> None:
            neighbour[0] = max(0, alone(device.allocator.reserved))

        for at, room in enumerate((needs.at(CHUNK), needs.at(CHUNK // 2))):
            loop.passes.clear()
            leave(room)
            loop.before_forward = take_all
            loop.ask(4 + at, CHUNK)
            loop.turn()
            found[f"taken_under_way_{at}"] = list(loop.passes)
            loop.before_forward = lambda: None
            neighbour[0] = 0
            loop.rest()
        found["errors"] = loop.errors()
        found["counters"] = vars(guard.counters)
        found["counts"] = counts
        found["misses"] = misses
        found["before"], found["after"] = before, held(scheduler)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
