"""What a chunk changes in the scheduler, noted before it and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine_hooks.freetoken.holdings import decoder_layers

# Free lists that a pool keeps as a tensor or a list; the engine replaces the tensors and edits the lists.
_FREE_LISTS = ("free_slots", "_free_slots", "_swa_free", "_free")
# What the expert cache counts, over all requests, for the engine's own statistics.
_COUNTERS = ("stat_", "lru_stats", "decode_freq", "prefill_hit_rows", "prefill_total_rows")


class Before:
    """The scheduler's bookkeeping at an idle moment.

    The free lists' tensors are never edited in place by the engine (it slices and concatenates), so keeping the
    object is keeping its content, order included; Python lists are copied. Page-table and token-pool rows are copied
    to host memory, so that nothing is added to what is being measured.
    """

    def __init__(self, scheduler: Any, rng: tuple[Any, Any] | None = None) -> None:
        """``rng``: random state to put back, of an earlier moment."""
        import torch

        self._scheduler = scheduler
        self._lists = [(owner, name, _kept(getattr(owner, name))) for owner, name in _free_lists(scheduler)]
        self._pending = list(scheduler.prefill_manager.pending_list)
        self._iteration = scheduler._forward_iter
        self._running = set(scheduler.decode_manager.running_reqs)
        self._pages = scheduler.cache_manager.free_slots
        self._page_order: Any = None
        self._shuffled: Any = None
        self._blank = False
        experts = scheduler.engine.moe_offload_cache
        self._counters = {
            name: value.cpu() if hasattr(value, "cpu") else value
            for name, value in (vars(experts) if experts is not None else {}).items()
            if name.startswith(_COUNTERS)
        }
        device = scheduler.device
        self.rng = rng or (torch.get_rng_state(), torch.cuda.get_rng_state(device))
        # Rows are empty at the end of a boot; keep what is there all the same.
        self._saved_rows: dict[int, tuple[Any, Any]] = {}

    def keep_rows(self, count: int) -> None:
        """Note the page-table and token-pool rows that the next ``count`` requests will get."""
        tables = self._scheduler.table_manager
        for row in tables._free_slots[-count:]:
            if row not in self._saved_rows:
                copies = [table[row].to("cpu", copy=True) for table in (tables.page_table, self._scheduler.token_pool)]
                self._saved_rows[row] = (copies[0], copies[1])

    def shuffle_free_pages(self) -> None:
        """Have the free pages of the KV pool handed out in the order that a used free list has: none.

        In place, so that no second list is part of what is measured; ``restore`` puts the order back.
        """
        import torch

        if self._page_order is None:  # once: of 33 million pages it takes a second
            self._page_order = self._pages.to("cpu", copy=True)
            chance = torch.Generator().manual_seed(len(self._pages))
            self._shuffled = self._page_order[torch.randperm(len(self._pages), generator=chance)]
        self._pages.copy_(self._shuffled)

    def blank_cache(self) -> None:
        """Zero the KV pool, once, before a chunk attends to tokens whose forward was not run.

        Every page is free. Memory that was never written may hold NaN, which an indexer or a router must not meet.
        Index maps (integers) are state, and kept.
        """
        if self._blank:
            return
        for tensor in _tensors(self._scheduler.engine.kv_cache):
            if tensor.is_floating_point() or tensor.element_size() == 1:
                tensor.zero_()
        self._blank = True

    def restore(self, reqs: list[Any], *, failed: bool = False) -> None:
        """Give back everything that ``reqs`` hold, and put the bookkeeping back as it was noted.

        The device must be idle. ``reqs`` are the requests of the chunk that ran or failed. Whatever fails on the
        device, the lists are put back. ``failed``: the allocator may have nothing left.
        """
        import torch

        scheduler = self._scheduler
        if failed:
            torch.cuda.empty_cache()  # the device steps below allocate a little, right after running out perhaps
        try:
            self._restore_device(reqs)
        finally:
            for owner, name, value in self._lists:
                setattr(owner, name, _kept(value))
            scheduler.prefill_manager.pending_list = list(self._pending)
            scheduler.decode_manager.running_reqs = set(self._running)
            scheduler._forward_iter = self._iteration
            torch.set_rng_state(self.rng[0])
        torch.cuda.set_rng_state(self.rng[1], scheduler.device)
        torch.cuda.synchronize(scheduler.device)

    def _restore_device(self, reqs: list[Any]) -> None:
        scheduler = self._scheduler
        tables, pool = scheduler.table_manager, scheduler.engine.linear_state_pool
        encoded = getattr(scheduler.engine, "encoder_cache", None)
        for req in reqs:
            scheduler.cache_manager.unlock(req.cache_handle)
            if encoded is not None and req.mm_items:
                encoded.release(req.uid, [item.hash for item in req.mm_items])
        self._unbind_windows()
        _forget_prefetched(scheduler.engine.model)
        if self._page_order is not None:
            self._pages.copy_(self._page_order)
        for row, (pages, tokens) in self._saved_rows.items():
            tables.page_table[row].copy_(pages)
            scheduler.token_pool[row].copy_(tokens)
        self._reset_experts(scheduler.engine.moe_offload_cache)
        if pool is not None:
            for req in reqs:
                own = req.linear_slot_idx if req.linear_slot_idx is not None else req.table_idx
                pool.clear_slots([*(req.mamba_ping_pong or ()), own])

    def _reset_experts(self, experts: Any) -> None:
        """No expert is in a slot, and none of the chunk's was counted."""
        if experts is None:
            return
        experts.reset()
        for name, value in self._counters.items():
            if hasattr(value, "cpu"):
                getattr(experts, name).copy_(value)
            else:
                setattr(experts, name, value)

    def _unbind_windows(self) -> None:
        """Undo the bindings of window pools (SWA, DeepSeek-V4) to the pages that the chunk took.

        By the free list, which pages are taken from the front of, and not by the page table: a chunk that failed
        early has not written its row yet, and one that came back has a length of one token more than it has pages.
        """
        cache = self._scheduler.cache_manager
        if cache.swa_pool is None or not getattr(cache.swa_pool, "swa_paged", False):
            return
        taken = self._pages[: len(self._pages) - len(cache.free_slots)]
        if len(taken):
            cache.swa_pool.free_swa(cache._page_to_token(taken))


def _forget_prefetched(model: Any) -> None:
    """Let go of lookups that were started for layers which the chunk did not reach (per-layer embeddings of 0.1.3 on).

    The engine would keep their tensors until its next prefill, and drop them there.
    """
    for layer in decoder_layers(model):
        embedded = getattr(layer, "ple", None)
        for owner in (embedded, getattr(getattr(embedded, "ple_embedding", None), "_table", None)):
            if owner is not None and isinstance(getattr(owner, "_pending", None), tuple):
                owner._pending = None


def _tensors(pool: Any) -> Iterator[Any]:
    """Every tensor of a KV pool and of the pools that it is made of."""
    import torch

    for value in vars(pool).values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                yield each
            elif type(each).__module__.startswith("freetoken.kvcache") and hasattr(each, "__dict__"):
                yield from _tensors(each)


def _kept(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _free_lists(scheduler: Any) -> Iterator[tuple[Any, str]]:
    """Every free list of the scheduler's managers and pools, as (owner, attribute)."""
    swa_pool = scheduler.cache_manager.swa_pool
    owners = [scheduler.cache_manager, scheduler.table_manager, scheduler.engine.linear_state_pool, swa_pool]
    # DeepSeek-V4's pools keep their free lists one object down.
    owners += [value for value in vars(swa_pool).values() if hasattr(value, "__dict__")] if swa_pool is not None else []
    for owner in owners:
        for name in _FREE_LISTS:
            # As an instance attribute: a method of the same name (CacheManager._free) is not a list.
            if owner is not None and name in vars(owner):
                yield owner, name
