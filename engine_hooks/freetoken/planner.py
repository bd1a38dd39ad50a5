"""The engine's own planner, asked again: what would another memory ratio give?

Nothing of the planner is written again here. While the engine boots, ``PlannerTap`` notes the arguments with which the
engine calls its own two planning functions; ``Planner`` calls the same functions with another ratio.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prefill_probe.engine import Budget, Geometry, PlanRefused, Pool


@dataclass
class PlannerTap:
    """What the engine asked its planner, and the sizes that its configuration gave before the planner filled them in.

    Attributes:
        kv_budget: arguments of ``_startup_kv_budget``: ratio, free bytes before load, free bytes then.
        moe_auto: keyword arguments of ``resolve_moe_cache_auto``; None where the expert cache is not automatic.
        given: the configuration's own values, by field.
    """

    kv_budget: tuple[float, int, int] | None = None
    moe_auto: dict[str, Any] | None = None
    given: dict[str, Any] = field(default_factory=dict)


# Flags whose value is a size of ``Scheduler.rebuild_cache``.
_SIZE_FLAGS = {"--num-pages": "num_pages", "--moe-cache-size": "moe_cache_size"}
_GIVEN = (
    "memory_ratio",
    "max_extend_tokens",
    "num_page_override",
    "num_token_override",
    "moe_cache_size",
    "moe_cache_rate",
    "moe_cache_mem",
    "moe_cache_auto",
)


@contextmanager
def tap(config: Any) -> Iterator[PlannerTap]:
    """Note what the planner is asked while the block runs; the engine's functions are as before afterwards."""
    from freetoken.engine import cache_budget
    from freetoken.engine import engine as engine_module

    noted = PlannerTap(given={name: getattr(config, name, None) for name in _GIVEN})
    kv_budget, moe_auto = engine_module._startup_kv_budget, cache_budget.resolve_moe_cache_auto

    def note_kv(memory_ratio: float, init_free_memory: int, new_free_memory: int) -> Any:
        noted.kv_budget = (memory_ratio, init_free_memory, new_free_memory)
        return kv_budget(memory_ratio, init_free_memory, new_free_memory)

    def note_moe(**arguments: Any) -> Any:
        noted.moe_auto = arguments
        return moe_auto(**arguments)

    engine_module._startup_kv_budget, cache_budget.resolve_moe_cache_auto = note_kv, note_moe
    try:
        yield noted
    finally:
        engine_module._startup_kv_budget, cache_budget.resolve_moe_cache_auto = kv_budget, moe_auto


@contextmanager
def quiet() -> Iterator[None]:
    """While the block runs, nothing below a warning is logged: what the engine says of a trial is not so."""
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(disabled)


class Planner:
    """The planner of one booted engine.

    Args:
        engine: the engine.
        noted: what ``tap`` noted while it booted.
    """

    def __init__(self, engine: Any, noted: PlannerTap) -> None:
        self._engine = engine
        self._noted = noted
        self._given = noted.given
        self._page_bytes = int(engine._pool_cls.kv_cost(engine.config)[0])
        self._at_start = self.present()

    @property
    def kv_explicit(self) -> bool:
        """Whether the KV pool's size was given by flag."""
        return any(self._given.get(name) is not None for name in ("num_page_override", "num_token_override"))

    @property
    def experts_automatic(self) -> bool:
        """Whether the engine chose the expert cache's size."""
        return self._noted.moe_auto is not None

    def budget(self) -> Budget:
        """How memory was planned, for the advice."""
        engine, config = self._engine, self._engine.config
        return Budget(
            memory_ratio=float(config.memory_ratio),
            free_before_load_bytes=self._noted.kv_budget[1] if self._noted.kv_budget else int(engine._baseline_free),
            ratio_governs=not self.kv_explicit or self.experts_automatic,
            # DeepSeek-V4 overwrites the chunk with the sequence length (``_adjust_dsv4_config``).
            chunk_governs=self._given.get("max_extend_tokens") == config.max_extend_tokens,
            pools=self._pools(),
            others=self._others(),
        )

    def _others(self) -> tuple[tuple[str, str], ...]:
        """Flags of this engine version, not yet given, that make a chunk need less."""
        config = self._engine.config
        found = []
        if getattr(config, "moe_prefill_overlap", False) and self._engine.moe_offload_cache is not None:
            found.append(("--disable-moe-prefill-overlap", "one expert buffer less, prefill waits for experts"))
        if getattr(config, "embed_weights", None) == "gpu":
            found.append(("--embed-weights host", "embeddings in host memory, looked up there"))
        return tuple(found)

    def sizes(self, flags: Mapping[str, int | float]) -> dict[str, int]:
        """What ``Scheduler.rebuild_cache`` must be given for the pools that the engine would make with ``flags``; none:
        those of this start.

        Raises:
            PlanRefused: as ``plan``.
        """
        page = int(self._engine.config.page_size)
        sizes = dict(self._at_start)
        if (ratio := flags.get("--memory-ratio")) is not None:
            geometry = self.plan(float(ratio))
            sizes["num_pages"] = geometry.kv_tokens // page
            if geometry.expert_slots is not None:
                sizes["moe_cache_size"] = geometry.expert_slots
        if (tokens := flags.get("--num-tokens")) is not None:
            sizes["num_pages"] = int(tokens) // page
        sizes |= {name: int(flags[flag]) for flag, name in _SIZE_FLAGS.items() if flag in flags}
        return sizes

    def pinned(self, arguments: Sequence[str]) -> list[str]:
        """The engine's ``arguments`` with the sizes of this start's pools in place of what they were planned by."""
        found = [word for word in arguments if word != "--moe-cache-auto"]
        sizes = self.present()
        if not self.kv_explicit:
            found += ["--num-pages", str(sizes["num_pages"])]
        if self.experts_automatic:
            found += ["--moe-cache-size", str(sizes["moe_cache_size"])]
            if not self._engine.config.moe_prefill_overlap:
                found += ["--disable-moe-prefill-overlap"]
        return found

    def present(self) -> dict[str, int]:
        """The pools' sizes now, as ``sizes``."""
        found = {"num_pages": int(self._engine.num_pages)}
        if self._engine.moe_offload_cache is not None:
            found["moe_cache_size"] = int(self._engine.moe_offload_cache.cache_size)
        return found

    def geometry(self) -> Geometry:
        """The pools as they are now."""
        sizes = self.present()
        return self._geometry(sizes["num_pages"], sizes.get("moe_cache_size"))

    def _geometry(self, pages: int, slots: int | None) -> Geometry:
        size = pages * self._page_bytes + (slots or 0) * self._slot_bytes()
        return Geometry(kv_tokens=pages * int(self._engine.config.page_size), expert_slots=slots, pool_bytes=size)

    def _pools(self) -> tuple[Pool, ...]:
        """Pools with explicit sizes, where the other pool would not take what they give up."""
        if self.experts_automatic or not self.kv_explicit:
            return ()
        page = int(self._engine.config.page_size)
        pages = int(self._engine.num_pages)
        by_tokens = self._given.get("num_token_override") is not None
        pools = [
            Pool("--num-tokens", pages * page, max(1, self._page_bytes // page), page, 2 * page)
            if by_tokens
            else Pool("--num-pages", pages, self._page_bytes, 1, 2)
        ]
        cache = self._engine.moe_offload_cache
        slot = self._slot_bytes()
        if cache is not None and slot and self._given.get("moe_cache_size"):
            pools.append(Pool("--moe-cache-size", int(cache.cache_size), slot, 1, int(cache.num_experts)))
        return tuple(pools)

    def _slot_bytes(self) -> int:
        from freetoken.engine.cache_budget import expert_bytes_per_slot

        if self._noted.moe_auto is not None:
            return int(self._noted.moe_auto["per_expert_bytes"])
        sources = getattr(self._engine.moe_offload_cache, "bank_sources", None)
        return int(expert_bytes_per_slot(sources)) if sources else 0

    def plan(self, memory_ratio: float) -> Geometry:
        """The pools that the engine would make at ``memory_ratio``.

        Raises:
            PlanRefused: below one of the planner's floors; the text is the planner's.
        """
        slots = self._at_start.get("moe_cache_size")
        pages = self._at_start["num_pages"]
        try:
            if self._noted.moe_auto is not None:
                from freetoken.engine.cache_budget import resolve_moe_cache_auto

                slots, planned, _ = resolve_moe_cache_auto(**{**self._noted.moe_auto, "memory_ratio": memory_ratio})
                pages = pages if self.kv_explicit else planned
            elif not self.kv_explicit:
                pages = self._solve_pages(memory_ratio)
        except (AssertionError, ValueError, RuntimeError) as refusal:
            raise PlanRefused(str(refusal).splitlines()[0] if str(refusal) else type(refusal).__name__) from None
        return self._geometry(pages, slots)

    def _solve_pages(self, memory_ratio: float) -> int:
        from freetoken.engine import engine as engine_module
        from freetoken.kvcache.linear_state_pool import state_pool_bytes

        if self._noted.kv_budget is None:
            raise PlanRefused("the engine did not plan its KV pool by a ratio")
        _, free_before_load, free_then = self._noted.kv_budget
        config = copy.copy(self._engine.config)
        object.__setattr__(config, "num_page_override", None)
        available = engine_module._startup_kv_budget(memory_ratio, free_before_load, free_then)
        with quiet():  # the engine logs "Allocating ..." here, and nothing is allocated
            return int(self._engine._pool_cls.solve_num_pages(config, available - state_pool_bytes(config)))
