"""A host that lives in memory: the Engine protocol over a budget of bytes, with the failures that tests ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefill_probe import Budget, Geometry, Identity, Limits, PlanRefused, Shape
from prefill_probe.engine import NotResizable, Routing
from prefill_probe.meter import Measured, Peak, Reading
from prefill_probe.neighbours import Load, Neighbours

MIB = 1 << 20


AUTOMATIC = Budget(0.95, 15360 * MIB, ratio_governs=True, chunk_governs=True)


class OutOfMemoryError(RuntimeError):
    """What a caching allocator raises; the name is what counts."""


def out_of_memory(requested: int, free: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {requested / MIB:.2f} MiB. GPU 0 has a total capacity of 15.50 GiB "
        f"of which {free / MIB:.2f} MiB is free."
    )


class MemoryMeter:
    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine
        self.timed = True
        self.peak = 0
        self.foreign = 0
        self.neighbours_known = False

    def read(self) -> Reading:
        engine = self._engine
        engine.fragments = 0
        return Reading(0, 0, engine.headroom - engine.resident - self.foreign, engine.total)

    def reread(self, start: Reading) -> Reading:
        return start

    def boot_peak(self) -> Peak:
        return Peak(self.peak, self.peak, 0)

    def neighbours(self) -> Neighbours:
        return Neighbours(True, {4242: self.foreign}) if self.neighbours_known else Neighbours()

    def load(self) -> Load:
        return Load(100, 300.0, self._engine.total)

    @contextmanager
    def measure(self, idle: Reading) -> Iterator[Measured]:
        measured = Measured()
        self.peak = 0
        resident = self._engine.resident
        foreign = self.foreign
        try:
            yield measured
        finally:
            grown = self._engine.resident - resident + max(0, self.foreign - foreign)
            reserved = self.peak + self._engine.fragments
            measured.peak = Peak(self.peak, reserved, reserved + grown)
            self._engine.fragments += self._engine.fragments_each_run
            measured.seconds = self._engine.seconds
            measured.free_bytes = idle.free_bytes - self.peak

    @contextmanager
    def trace(self) -> Iterator[list[dict[str, Any]]]:
        events: list[dict[str, Any]] = []
        self._engine.traces += 1
        try:
            yield events
        finally:
            third = self.peak // 3 if self._engine.routing else 0
            for address, (size, name) in enumerate(((third, "GDN"), (self.peak - third, "MoE")) if third else ()):
                frames = [{"filename": "model.py", "line": 7, "name": name}]
                events.append({"action": "alloc", "addr": address, "size": size, "frames": frames})

    def allocations(self) -> int:
        return 2 * self._engine.traces if self._engine.routing else 0

    def graph_bytes(self) -> int:
        return 0

    def unused(self) -> int:
        return 0

    def obtainable(self) -> tuple[int, int]:
        return self._engine.headroom - self._engine.resident - self.foreign - self._engine.fragments, 0

    def release(self) -> None:
        self._engine.fragments = 0

    def forget_peaks(self) -> None:
        self.peak = 0


@dataclasses.dataclass
class MemoryEngine:
    """``headroom`` bytes; a chunk of T tokens takes ``fixed + T * per_token``, the first one ``first_extra`` more.

    ``extra`` is what a shape takes beyond that. What the allocator keeps unused grows by ``fragments_each_run`` at
    every run, until it is handed back.

    ``before_run`` is called with the number of the run and the shape, and may raise or change the engine.
    """

    headroom: int
    per_token: int = MIB // 5
    fixed: int = 20 * MIB
    first_extra: int = 0
    resident_after_first: int = 0
    extra: Callable[[Shape], int] = lambda shape: 0
    fragments_each_run: int = 0
    state_tokens: int = 0
    routing: Routing | None = None
    refuses_to_resize: bool = False
    chunk: int = 8192
    requested: int = 8192
    longest: int = 262143
    sequences: int = 1
    kv_pages: int = 70000
    page: int = 64
    align: int = 64
    total: int = 16384 * MIB
    budget_: Budget = AUTOMATIC
    floor: float = 0.5
    gpu: dict[str, Any] = dataclasses.field(default_factory=dict)
    before_run: Callable[[int, Shape], None] = lambda number, shape: None
    issue: Callable[[Shape], Shape] = lambda shape: shape
    ranks: Callable[[Any], list[Any]] = lambda value: [value]
    rank: int = 0
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    held_fails: bool = False

    def __post_init__(self) -> None:
        self.resident = 0
        self.seconds = 0.5
        self.shapes: list[Shape] = []
        self.settled = 0
        self.fragments = 0
        self.traces = 0
        self.given = self.headroom
        self.resized: list[dict[str, Any]] = []
        self.meter = MemoryMeter(self)

    def identity(self) -> Identity:
        return Identity(
            {"name": "memory", "version": "1"},
            {"path": "/models/example", "architecture": "Example", "layers": 4, "hidden_size": 64},
            {"name": "Example GPU", "capability": "9.0", "total_bytes": self.total, "wsl": False, "unified": False}
            | self.gpu,
            {"--max-prefill-length": self.requested},
            {"torch": "2"},
        )

    def limits(self) -> Limits:
        return Limits(
            self.requested,
            self.chunk,
            "",
            self.align,
            self.longest,
            self.sequences,
            self.page,
            self.kv_pages,
            self.state_tokens,
        )

    def budget(self) -> Budget:
        return self.budget_

    def plan(self, memory_ratio: float) -> Geometry:
        if memory_ratio < self.floor:
            raise PlanRefused("cache budget too small")
        tokens = int(memory_ratio * 1_000_000)
        return Geometry(tokens, None, tokens * 1024)

    def resize(self, flags: Any) -> Geometry:
        self.resized.append(dict(flags))
        if flags and self.refuses_to_resize:
            raise NotResizable("the pools cannot be resized")
        budget = self.budget_
        ratio = flags.get("--memory-ratio", budget.memory_ratio)
        geometry = self.plan(ratio)
        self.headroom = self.given + int((budget.memory_ratio - ratio) * budget.free_before_load_bytes)
        for pool in budget.pools:
            if (value := flags.get(pool.flag)) is not None:
                if value < pool.floor:
                    raise PlanRefused("below the floor")
                self.headroom += (pool.value - value) * pool.unit_bytes
        return geometry

    def adopt_chunk(self, tokens: int) -> None:
        self.chunk = tokens

    def run(self, shape: Shape) -> Shape:
        self.shapes.append(shape)
        self.before_run(len(self.shapes), shape)
        issued = self.issue(shape)
        want = self.fixed + issued.new_tokens * self.per_token + self.extra(issued)
        if len(self.shapes) == 1:
            want += self.first_extra
            self.resident = self.resident_after_first
        free = self.headroom - self.resident - self.meter.foreign
        if want > free:
            self.meter.peak = max(self.meter.peak, free * 9 // 10)
            raise out_of_memory(160 * MIB, free // 10)
        self.meter.peak = want
        return issued

    def issued(self, shape: Shape) -> Shape:
        return self.issue(shape)

    def site(self, error: BaseException) -> str:
        return "GDN causal conv (conv.py:1)"

    def place(self, frames: Any) -> tuple[str, str]:
        return (frames[0][2], f"{frames[0][2]} (model.py:{frames[0][1]})") if frames else ("other", "")

    @contextmanager
    def observe(self) -> Iterator[list[Routing]]:
        found: list[Routing] = []
        yield found
        if self.routing:
            found.append(self.routing)

    @contextmanager
    def layers(self) -> Iterator[list[Any]]:
        # Of the two blocks of every trace the first is allocated by layer 0 and the second by layer 1.
        before = 2 * (self.traces - 1)
        yield [(before, 0), (before + 1, 1), (before + 2, -1)]

    def holdings(self) -> dict[str, int]:
        if self.held_fails:
            raise RuntimeError("a pool of a kind that is not known")
        return dict(self.held)

    def gather(self, value: Any) -> list[Any]:
        return self.ranks(value)

    def settle(self) -> None:
        self.settled += 1
