"""The cells of one start: verdict, then requests, each cell from the state after boot; one JSON line a cell.

truth.py ORDER      ORDER is a JSON object, see ``run_start`` in matrix.py. A process of its own.

After a request ran out of memory its engine is not trusted: its scheduler's queues are emptied and every pool, page
table, free list, prefix tree and captured graph is made anew by the engine's own ``Scheduler.rebuild_cache``, as it is
between any two cells. Weights stay; what they and the pools take is compared with what it was.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

GIB, MIB = 1 << 30, 1 << 20
# What the start's own pools may take; those of the cells are made later.
BOOT_BYTES, BOOT_SHARE = 20 * GIB, 0.6
# Of the cells with room: their pools are planned for what a card of that size has.
ROOM_RATIO = 0.85
# A card may be smaller than what pools are planned for by as much as the room that those leave.
LARGEST_SHARE = 1.05
# Explicit pools.
TOKENS, SLOTS = 196_608, 512
TURNS = 3
SHORTER_EIGHTHS = (3, 5, 7)
# Prompts in chunks. A deep one goes on where the first long one ended, and all but its last chunk is served once.
LONG_CHUNKS, DEEP_CHUNKS = 5, 8
# What an engine takes of the card before it looks how much is free (prefill_probe.virtual.device).
CONTEXT_BYTES = int(593.56 * MIB)
SERVE = ["--moe-cache-auto", "--disable-moe-prefill-overlap", "--dummy-weight", "--text-model-only"]


class Virtual:
    """A virtual GPU beside whose engine another process holds memory."""

    def __init__(self, device: Any) -> None:
        self._held = 0
        alone = device._free_beside
        device.allocator._device_free = lambda reserved: alone(reserved) - self._held

    def take(self, size: int) -> None:
        """From now on the other process holds ``size`` bytes, in pages of 2 MiB."""
        self._held = max(0, size) // (2 * MIB) * (2 * MIB)


@contextlib.contextmanager
def virtual_engine(arguments: list[str], fresh: dict[str, Any] | None) -> Iterator[tuple[Any, Any]]:
    """The engine on a virtual H200, and what holds memory beside it."""
    from engine_hooks.freetoken import virtual
    from prefill_probe.virtual.cards import card_named

    card = card_named("H200")
    ratio = round(min(BOOT_SHARE, BOOT_BYTES / card.usable_bytes), 4)
    if fresh:
        ratio, card = fresh["memory_ratio"], replace(card, usable_bytes=fresh["free_bytes"] + CONTEXT_BYTES)
    with virtual.started([*arguments, "--memory-ratio", str(ratio)], card) as (engine, device):
        yield engine, Virtual(device)


@contextlib.contextmanager
def real_engine(arguments: list[str], fresh: dict[str, Any] | None) -> Iterator[tuple[Any, Any]]:
    """The engine on this machine's GPU, its own probe left out, and a process that holds memory beside it.

    With QUICK (machine.py) on PYTHONPATH its dummy weights are such that tokens vary.
    """
    from machine import Ballast

    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(
            Ballast, fresh["free_bytes"] + CONTEXT_BYTES if fresh else 0
        )  # it imports torch as well: meanwhile
        import torch
        from freetoken.scheduler import Scheduler

        from engine_hooks.freetoken.engine import FreeTokenEngine
        from engine_hooks.freetoken.planner import tap
        from engine_hooks.freetoken.virtual import parsed
        from prefill_probe.meter import kept_peaks

        ballast = starting.result()
    try:
        ratio = fresh["memory_ratio"] if fresh else round(min(BOOT_SHARE, BOOT_BYTES / ballast.free()), 4)
        config = replace(parsed([*arguments, "--memory-ratio", str(ratio)]), offline_mode=True)
        with torch.inference_mode(), tap(config) as noted, kept_peaks() as peaks:  # as the server's ranks do
            scheduler = Scheduler(config)
        yield FreeTokenEngine(scheduler, noted, peaks), ballast
        torch.distributed.destroy_process_group()
    finally:
        ballast.close()


def burst_lengths(chunk: int, count: int) -> list[int]:
    """``count`` prompts that share a chunk, one token above multiples of 64, at which recurrent state is kept; the last
    has the rest.
    """
    units, rest = divmod(max(0, chunk - count), 64)
    lengths = [1 + 64 * (units // count + (number < units % count)) for number in range(count)]
    return [*lengths[:-1], lengths[-1] + rest]


class Clients:
    """Requests through the scheduler's own overlapped loop, with random prompts that no earlier one began with."""

    def __init__(self, scheduler: Any, limits: Any, chunk: int) -> None:
        import torch

        self._scheduler, self._limits, self._chunk = scheduler, limits, chunk
        self._inbox: list[Any] = []
        self._last: Any = None
        self._uid = 0
        self._ids = torch.Generator().manual_seed(random.Random(chunk).randrange(1 << 30))
        self._vocabulary = int(scheduler.config.model_config.vocab_size)
        scheduler.receive_msg = lambda blocking: [self._inbox.pop(0) for _ in list(self._inbox)]
        scheduler.send_result = lambda messages: None
        pool = limits.kv_pages * limits.page_tokens
        self._longest = min(limits.longest_prompt, pool - limits.page_tokens) - 64
        self._first = self._prompt(max(chunk, min(LONG_CHUNKS * chunk, self._longest - chunk)))
        rest = min(DEEP_CHUNKS * chunk, self._longest) - chunk - len(self._first)
        self._before_deep = torch.cat([self._first, self._prompt(max(0, rest))])
        self._turns = 0

    def kinds(self) -> dict[str, Callable[[], None]]:
        """What is served, by name."""
        lengths = burst_lengths(self._chunk, max(2, self._limits.max_sequences))
        return {
            "long prompt": self._serve_long,
            "burst": lambda: self._serve([self._prompt(length) for length in lengths], 4),
            "deep prompt": self._serve_deep,
        }

    def _serve_long(self) -> None:
        self._serve([self._prompt(len(self._first)) if self._turns else self._first], 4)

    def _serve_deep(self) -> None:
        """A prompt whose last chunk follows a prefix that was served before, while others generate."""
        import torch

        if not self._turns:
            self._serve([self._before_deep], 1)
        self._turns += 1
        others = self._limits.max_sequences - 1
        self._ask([self._prompt(64) for _ in range(others)], 6)
        self._turn(3 if others else 0)
        self._serve([torch.cat([self._before_deep, self._prompt(self._chunk)])], 2)

    def serve_longer_after(self, shorter: int) -> None:
        """Two prompts, as a start's first: the shorter divides the allocator's memory as suits it."""
        for length in (shorter, self._chunk):
            self._serve([self._prompt(min(length, self._longest))], 2)

    def _prompt(self, tokens: int) -> Any:
        import torch

        return torch.randint(2, self._vocabulary, (tokens,), generator=self._ids, dtype=torch.int32)

    def _ask(self, prompts: list[Any], tokens: int) -> None:
        from freetoken.core import SamplingParams
        from freetoken.message import UserMsg

        for prompt in prompts:
            self._uid += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            self._inbox.append(UserMsg(uid=self._uid, input_ids=prompt, sampling_params=sampling))

    def _turn(self, times: int = 1) -> None:
        for _ in range(times):
            self._last = self._scheduler.overlap_loop(self._last)

    def _serve(self, prompts: list[Any], tokens: int) -> None:
        """Until all are through."""
        self._ask(prompts, tokens)
        scheduler = self._scheduler
        while self._inbox or self._last or scheduler.prefill_manager.runnable or scheduler.decode_manager.runnable:
            self._turn()


def forget_requests(scheduler: Any) -> None:
    """Nobody waits or runs, and neither the last step nor the last requests hold anything on the device."""
    scheduler.prefill_manager.pending_list.clear()
    scheduler.decode_manager.running_reqs = set()
    scheduler.finished_reqs = set()
    scheduler._last_data = None
    scheduler.receive_msg = lambda blocking: []
    gc.collect()


class Cells:
    """The cells of one start, one after the other."""

    def __init__(self, engine: Any, beside: Any) -> None:
        self._engine, self._beside = engine, beside
        self._scheduler = engine._scheduler
        self._noted = engine._planner._noted
        # What the planner was asked at the start.
        self._asked = (self._noted.kv_budget, self._noted.moe_auto)
        self._before_load = engine.budget().free_before_load_bytes
        # By ladder: the need, and what a start takes beside what its planner counts.
        self._needs: dict[str, int] = {}
        self._uncounted: dict[str, int] = {}
        # Peaks of the process's first run, until they are told, and of the last full chunk from empty caches.
        self._first_run: dict[str, int] | None = None
        self._told_first = False
        self._plain: dict[str, int] | None = None
        self._room: dict[str, dict[str, int]] = {}

    # A state as after a boot -----------------------------------------------------------------------------------

    def _pools(self, order: dict[str, Any], ratio: float) -> dict[str, int]:
        """Make the pools that a start with this memory and ratio makes, all anew; their sizes.

        Raises:
            PlanRefused: the planner gives none.
        """
        import torch

        from engine_hooks.freetoken.engine import FreeTokenEngine, _unpriced
        from engine_hooks.freetoken.planner import quiet

        scheduler, visible = self._scheduler, int(order["visible_gib"] * GIB)
        self._beside.take(0)
        budget, auto = self._asked
        planner = self._engine._planner
        if visible:
            if budget:
                self._noted.kv_budget = (ratio, visible, visible - (budget[1] - budget[2]))
            self._noted.moe_auto = auto and auto | {"baseline_free": visible}
            sizes = planner.sizes({"--memory-ratio": ratio})
        else:
            sizes = planner.sizes({"--num-tokens": TOKENS, "--moe-cache-size": SLOTS})
        sizes = {name: size for name, size in sizes.items() if name in planner.present()}
        # A resize is priced by the ratio of this start, which is another one.
        with torch.inference_mode(), quiet(), _unpriced(scheduler.engine.kv_cache):
            scheduler.rebuild_cache(**sizes)
        self._noted.given["max_extend_tokens"] = order["chunk"]
        self._engine.adopt_chunk(order["chunk"])
        # It notes the scheduler's bookkeeping as it is now.
        self._engine, meter = FreeTokenEngine(scheduler, self._noted), self._engine.meter
        self._engine.meter.timed = meter.timed
        return sizes

    def _leave(self, headroom: int) -> int:
        """Have the process beside hold all but ``headroom`` bytes; what is left then."""
        self._beside.take(self._engine.meter.read().free_bytes - headroom)
        return int(self._engine.meter.read().free_bytes)

    def _clear(self) -> None:
        """Nobody waits or runs; what an error left behind is let go."""
        import torch

        scheduler = self._scheduler
        self._beside.take(0)
        forget_requests(scheduler)
        torch.cuda.synchronize()
        if scheduler.engine.moe_offload_cache is not None:
            with torch.inference_mode():
                scheduler.engine.moe_offload_cache.reset()

    # What is asked ---------------------------------------------------------------------------------------------

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """One cell."""
        from prefill_probe.engine import PlanRefused

        began, ladder, step = time.monotonic(), order["ladder"], order["step"]
        row = {name: order[name] for name in ("ladder", "step", "why", "chunk", "visible_gib")} | order["start"]
        room, visible = step <= 0, int(order["visible_gib"] * GIB)
        if visible > LARGEST_SHARE * self._before_load:
            return row | {"ok": True, "not_a_start": "this card has less"}
        if not room and ladder not in self._needs:
            return row | {"ok": True, "not_a_start": "the ladder's need was not measured"}
        wanted = 0 if room else int(step * self._needs[ladder])
        ratio = ROOM_RATIO if room else round(1 - (wanted + self._uncounted[ladder]) / max(visible, 1), 3)
        if visible:
            row["memory_ratio"] = ratio
        try:
            row["pools"] = self._pools(order, ratio)
        except PlanRefused as refusal:
            return row | {"ok": True, "not_a_start": str(refusal)}
        idle = self._engine.meter.read()
        row["idle_allocated_bytes"] = idle.allocated_bytes
        # Where a start on such a card would be, of which this one has more.
        natural = idle.free_bytes - (self._before_load - visible)
        if room:
            self._uncounted[ladder] = int((1 - ROOM_RATIO) * visible) - natural
        else:
            self._leave(wanted)
            if visible:
                row["card_differs_bytes"] = wanted - natural
        row |= self._verdict()
        if step == 0 and row["verdict"] in ("fits", "tight"):
            self._needs[ladder] = row["need"]["device_bytes"]
            row["shortcuts"] = self._shortcuts()
        row["truth"] = self._truth(order["chunk"])
        if step == 0:
            self._room[ladder] = {"allocated": idle.allocated_bytes, "need": row["need"]}
        if step == -1:
            first = self._room.get(ladder)
            row["as_before"] = None if first is None else first["allocated"] == idle.allocated_bytes
            row["need_before"] = first and first["need"]
        return row | {"ok": True, "seconds": round(time.monotonic() - began, 2)}

    def run_fresh(self, order: dict[str, Any]) -> dict[str, Any]:
        """The one cell of a start that was given its flags, on a card of its size: nothing is resized.

        A start leaves a little more than pools that are made anew; the process beside holds that.
        """
        began = time.monotonic()
        left = int(self._engine.meter.read().free_bytes)
        self._leave(order["headroom_bytes"])
        row = {name: order[name] for name in ("ladder", "step", "chunk", "memory_ratio")} | order["start"]
        row |= {"fresh": True, "start_left_bytes": left, "pools": self._engine._planner.present()} | self._verdict()
        row["truth"] = self._truth(order["chunk"])
        return row | {"ok": True, "seconds": round(time.monotonic() - began, 2)}

    def _verdict(self) -> dict[str, Any]:
        """What the probe says here; its advice is left out, which another acceptance tries."""
        from prefill_probe import ProbeSettings
        from prefill_probe._verdict import part_of
        from prefill_probe._walk import Walk
        from prefill_probe.shape import PLAIN

        began = time.monotonic()
        walk = Walk(self._engine, ProbeSettings(), lambda text: None, lambda: None)
        try:
            walk.run_all()
            part = part_of(walk)
        finally:
            self._engine.settle()
        if self._first_run is None:
            self._first_run = asdict(walk.runs[0].measured.peak)
        plain = [run.measured.peak for run in walk.runs if run.full and run.ok and run.family is PLAIN]
        self._plain = asdict(plain[-1]) if plain else None
        runs = [
            f"{each.name}, {each.run}: {each.outcome}, {each.peak.allocated_bytes} / {each.peak.device_bytes}"
            for each in part.shapes
        ]
        return {
            "verdict": part.verdict,
            "headroom_bytes": part.headroom_bytes,
            "margin_bytes": walk.margin,
            "need": asdict(part.need) if part.need else None,
            "fault": asdict(part.fault) if part.fault else None,
            "runs": runs,
            "notes": list(part.notes),
            "probe_seconds": round(time.monotonic() - began, 2),
        }

    def _truth(self, chunk: int) -> dict[str, Any]:
        """Requests, ``TURNS`` times, and the orders in which other starts may meet them: whether all were served, or
        which ran out of memory and where.
        """
        import torch

        from prefill_probe._walk import forget_frames
        from prefill_probe.faults import classify

        engine, at = self._engine, ""
        engine.settle()  # as a probe leaves it
        idle = engine.meter.read()
        found: dict[str, Any] = {"served": True}
        try:
            with torch.inference_mode(), engine.meter.measure(idle) as measured:
                clients: Clients | None = Clients(self._scheduler, engine.limits(), chunk)
                for turn in range(TURNS):
                    for name, serve in clients.kinds().items():
                        at = f"{name}, turn {turn + 1}"
                        serve()
                for eighths in SHORTER_EIGHTHS:  # as other starts would meet them
                    engine.meter.release()
                    at = f"full chunk after {eighths}/8 of one"
                    clients.serve_longer_after(max(1, chunk * eighths // 8))
            found["peak"] = asdict(measured.peak)
            # What the idle engine holds more than before: the prefix cache's lists of pages.
            found["kept_bytes"] = engine.meter.read().allocated_bytes - idle.allocated_bytes
        except Exception as error:
            fault = classify(error, free_bytes=measured.free_bytes, total_bytes=idle.total_bytes, wsl=False)
            if not fault.is_memory:
                raise
            found = {"served": False, "at": at, "site": engine.site(error), "requested_bytes": fault.requested_bytes}
            found |= {"free_bytes": fault.free_bytes}
            forget_frames(error)
        clients = None
        self._clear()
        return found

    # What others run instead -----------------------------------------------------------------------------------

    def _shortcuts(self) -> dict[str, Any]:
        """Peaks of runs that others base a verdict on, in this engine and state."""
        from prefill_probe.shape import Sequence, Shape, full_chunk

        full = full_chunk(self._engine.limits())
        found = {
            "position 0 alone": self._plain,
            "128 tokens": self._peak(Shape("128 tokens", (Sequence(0, 128),))),
        }
        if not self._virtual:  # where no kernel looks at them
            with mock.patch.object(self._engine, "_requests", self._zeros(self._engine._requests)):
                found["token id 0 alone"] = self._peak(full)
        if self._scheduler.engine.linear_state_pool is not None:
            with short_gdn():
                found["GDN at 64 tokens"] = self._peak(full)
        if not self._told_first:
            found["first run of the process"] = self._first_run
            self._told_first = True
        return found

    @property
    def _virtual(self) -> bool:
        return isinstance(self._beside, Virtual)

    @staticmethod
    def _zeros(requests: Callable[..., Any]) -> Callable[..., Any]:
        def blank(*args: Any, **kwargs: Any) -> Any:
            messages = requests(*args, **kwargs)
            for message in messages:
                message.input_ids.zero_()
            return messages

        return blank

    def _peak(self, shape: Any) -> dict[str, int]:
        engine = self._engine
        idle = engine.meter.read()
        with engine.meter.measure(idle) as measured:
            engine.run(shape)
        return asdict(measured.peak)


@contextlib.contextmanager
def short_gdn() -> Iterator[None]:
    """While the block runs, GDN layers run their convolution and their chunked kernel for the first 64 tokens alone.

    Projections, gates and norm see all tokens.
    """
    from freetoken.models.qwen3_5_moe import gdn as qwen35
    from freetoken.models.qwen4_exp import gdn as qwen4

    kernel = qwen35.gdn_prefill_chunk_fla

    def run_short(
        q: Any, k: Any, v: Any, g: Any, beta: Any, *, indices: Any, return_h: bool = False, **more: Any
    ) -> Any:
        head = [tensor[:, :64].contiguous() for tensor in (q, k, v, g, beta)]
        ends = more.pop("cu_seqlens")[:2].clamp(max=64)
        out = kernel(*head, indices=indices[:1], cu_seqlens=ends, return_h=return_h, **more)
        whole = v[0].new_zeros(v.shape[1:])
        if not return_h:
            return whole
        state = out[1][:, :1]
        return whole, state.expand(-1, v.shape[1] // 64 + 1, *state.shape[2:])

    with contextlib.ExitStack() as stack:
        for module, layer in ((qwen35, qwen35.Qwen3_5GatedDeltaNet), (qwen4, qwen4.Qwen4ExpGatedDeltaNet)):
            stack.enter_context(mock.patch.object(module, "gdn_prefill_chunk_fla", run_short))
            stack.enter_context(mock.patch.object(layer, "_conv_prefill", lambda layer, conv_in, *_: conv_in))
        yield


def main() -> None:
    order = json.loads(sys.argv[1])
    out, began = sys.stdout, time.monotonic()
    arguments = ["--model", order["model"], "--max-running-requests", str(order["running"]), *SERVE]
    arguments += ["--cuda-graph-max-bs", str(min(4, order["running"]))]
    largest = max(cell["chunk"] for cell in order["cells"])
    arguments += ["--max-prefill-length", str(largest), "--port", str(20_000 + os.getpid() % 20_000)]
    fresh = order["cells"][0] if order.get("fresh") else None
    if fresh and not fresh["visible_gib"]:
        arguments.remove("--moe-cache-auto")
        slots = fresh["pools"].get("moe_cache_size")
        arguments += ["--num-tokens", str(TOKENS), *(["--moe-cache-size", str(slots)] if slots else [])]
    with (virtual_engine if order["virtual"] else real_engine)(arguments, fresh) as (engine, beside):
        gc.freeze()  # what a start leaves stays, and need not be looked through a dozen times a cell
        booted = round(time.monotonic() - began, 1)
        cells = Cells(engine, beside)
        for number, cell in enumerate(order["cells"]):
            if time.monotonic() - began > order["seconds"]:
                return
            row = cells.run_fresh(cell) if fresh else cells.run(cell)
            if not number:
                row["boot_seconds"] = booted
            print(json.dumps({"cell": cell["name"]} | row), file=out, flush=True)


if __name__ == "__main__":
    main()
