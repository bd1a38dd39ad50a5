"""The Engine protocol: what a host offers the probe, and the small records that cross it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from prefill_probe.composition import Frame, Mark
from prefill_probe.meter import Meter
from prefill_probe.shape import Limits, Shape

T = TypeVar("T")


@dataclass(frozen=True)
class Identity:
    """What is probed; every part goes into the record as it is.

    Attributes:
        engine: name, version.
        model: path, architecture, layers, hidden_size, experts, experts_per_token, quantization.
        gpu: name, capability, total_bytes, driver, wsl, unified.
        flags: the engine's flags as given, without defaults.
        versions: of torch, triton and others that shape the need.
    """

    engine: dict[str, str]
    model: dict[str, Any]
    gpu: dict[str, Any]
    flags: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Pool:
    """A pool whose size was given by flag, so that a smaller value gives headroom.

    Attributes:
        flag: its name; ``value`` what was given.
        unit_bytes: what one unit of the value takes.
        step: a smaller value is a multiple of it.
        floor: the engine accepts none below.
    """

    flag: str
    value: int
    unit_bytes: int
    step: int = 1
    floor: int = 1


@dataclass(frozen=True)
class Budget:
    """How the engine's planner shared out the memory, and which flags govern it.

    Attributes:
        memory_ratio: the share that the planner may use; None where the engine has no such flag.
        free_before_load_bytes: what the ratio is a share of.
        ratio_governs: whether another ratio changes the headroom (not so where all pools have explicit sizes).
        chunk_governs: whether ``--max-prefill-length`` changes the chunk.
        pools: the pools whose sizes were given by flag, where no other pool would take what they give up.
        others: flags of this engine version that reduce what a chunk needs, as they are typed, and what each costs.
    """

    memory_ratio: float | None
    free_before_load_bytes: int
    ratio_governs: bool
    chunk_governs: bool
    pools: tuple[Pool, ...] = ()
    others: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Geometry:
    """Pool sizes that the engine's planner gives for a memory ratio.

    Attributes:
        kv_tokens: capacity of the KV pool.
        expert_slots: slots of the expert cache; None where the model has none.
        pool_bytes: what both take.
    """

    kv_tokens: int
    expert_slots: int | None
    pool_bytes: int


@dataclass(frozen=True)
class Routing:
    """What the routers of one chunk chose, by MoE layer in order.

    Attributes:
        experts: experts that a layer has.
        distinct: experts that at least one token was sent to.
        largest_load: tokens that were sent to the most loaded expert.
    """

    experts: int
    distinct: tuple[int, ...]
    largest_load: tuple[int, ...]


class PlanRefused(Exception):
    """The engine's planner does not accept a memory ratio; the text is the planner's."""


class NotResizable(PlanRefused):
    """The engine cannot resize its pools in place, whatever the size; the text says why."""


class ShapeRefused(Exception):
    """The engine's scheduler does not admit a shape; the text says what it admits."""


class Engine(Protocol):
    """A host under probe, idle, after it has captured its CUDA graphs.

    ``run`` may be called many times; ``settle`` once, at the end.

    Attributes:
        meter: of the device that it runs on.
        rank: its tensor-parallel rank; 0 without tensor parallelism.
    """

    meter: Meter
    rank: int

    def identity(self) -> Identity:
        """What is probed."""

    def limits(self) -> Limits:
        """What bounds a chunk."""

    def budget(self) -> Budget:
        """How memory was planned."""

    def plan(self, memory_ratio: float) -> Geometry:
        """The pools that the planner would make for another ratio.

        Raises:
            PlanRefused: it would make none.
        """

    def resize(self, flags: Mapping[str, int | float]) -> Geometry:
        """Give the pools, in place, the sizes that they would have at a start with ``flags`` (``--memory-ratio``, or
        those of ``Budget.pools``) beside the present ones; no flags: the sizes of this start.

        Raises:
            NotResizable: the engine cannot.
            PlanRefused: it does not accept these. In both cases its pools are as before.
        """

    def adopt_chunk(self, tokens: int) -> None:
        """From now on issue chunks of at most ``tokens`` tokens; ``limits`` says so as well."""

    def run(self, shape: Shape) -> Shape:
        """Run one chunk through the engine's own kernels and give back what it took.

        Returns:
            the shape that the scheduler really issued, which may hold fewer tokens.

        Raises:
            ShapeRefused: the scheduler does not admit it; nothing was run.
            whatever the engine raises. The engine is idle again and can run the next shape, unless the error says
            that the device is lost.
        """

    def issued(self, shape: Shape) -> Shape:
        """What the scheduler made of ``shape`` when it was last run, also if that run failed."""

    def site(self, error: BaseException) -> str:
        """Where in the engine ``error`` was raised, in a person's words; empty if unknown."""

    def place(self, frames: Sequence[Frame]) -> tuple[str, str]:
        """The component that a stack belongs to (``"other"`` if unknown), and the place in it; innermost first."""

    def observe(self) -> AbstractContextManager[list[Routing]]:
        """Context manager around one chunk; its list holds what the routers chose, if the model has any."""

    def layers(self) -> AbstractContextManager[list[Mark]]:
        """Context manager around one chunk; its list holds ``meter.allocations()`` as each layer began and ended."""

    def holdings(self) -> dict[str, int]:
        """What the engine holds on the device when idle: bytes by component, each storage once.

        The components are those of ``record.Held``; what belongs to none of them is left out. Nothing is allocated.
        """

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order; ``[value]`` without tensor parallelism."""

    def settle(self) -> None:
        """Leave everything as it was before the first ``run``."""
