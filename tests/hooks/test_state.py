"""What a chunk changes is put back: the engine's real managers and window pools, on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")

PAGES, PAGE, ROWS, WIDTH = 64, 16, 4, 1024


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own part (random state, synchronisation) has nothing to act on here."""
    import torch

    for name in ("synchronize", "empty_cache", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.zeros(1))


def scheduler_of(cache_type: str, window_pool: bool) -> Any:
    import torch
    from freetoken.kvcache.hybrid_swa_pool import HybridSWAKVCache
    from freetoken.scheduler.cache import CacheManager
    from freetoken.scheduler.decode import DecodeManager
    from freetoken.scheduler.prefill import PrefillManager
    from freetoken.scheduler.table import TableManager

    pool = None
    if window_pool:
        pool = HybridSWAKVCache.__new__(HybridSWAKVCache)
        pool._swa_paged, pool._full_num_tokens, pool._page_size = True, PAGES * PAGE, PAGE
        pool._swa_num_tokens, pool._device = 600, torch.device("cpu")
        pool._init_swa_paged_state()
    page_table = torch.zeros((ROWS + 1, WIDTH), dtype=torch.int32)
    cache = CacheManager(PAGES, PAGE, page_table, cache_type, swa_pool=pool, sliding_window_size=128)
    tables = TableManager(ROWS, page_table)
    decode = DecodeManager(PAGE)
    return SimpleNamespace(
        cache_manager=cache,
        table_manager=tables,
        decode_manager=decode,
        prefill_manager=PrefillManager(cache, tables, decode),
        token_pool=tables.token_pool,
        device=torch.device("cpu"),
        _forward_iter=7,
        engine=SimpleNamespace(linear_state_pool=None, moe_offload_cache=None),
    )


def digest(scheduler: Any) -> dict[str, Any]:
    pool = scheduler.cache_manager.swa_pool
    found = {
        "free_slots": scheduler.cache_manager.free_slots.tolist(),
        "rows": list(scheduler.table_manager._free_slots),
        "page_table": scheduler.table_manager.page_table.tolist(),
        "token_pool": scheduler.token_pool.tolist(),
        "pending": len(scheduler.prefill_manager.pending_list),
        "iteration": scheduler._forward_iter,
    }
    if pool is not None:
        found["window_free"] = pool._swa_free.tolist()
        found["window_map"] = pool.full_to_swa_index_mapping.tolist()
    return found


def begin(scheduler: Any, lengths: list[int]) -> list[Any]:
    """Admit prompts as the probe does; gives back the batch's requests."""
    import torch
    from freetoken.core import SamplingParams
    from freetoken.message import UserMsg

    for number, length in enumerate(lengths):
        ids = torch.arange(length, dtype=torch.int32) + 1
        scheduler.prefill_manager.add_one_req(UserMsg(-1000 - number, ids, SamplingParams(max_tokens=1)))
    batch = scheduler.prefill_manager.schedule_next_batch(512)
    assert batch is not None
    return list(batch.reqs)


@pytest.mark.parametrize("window_pool", [False, True])
@pytest.mark.parametrize("lengths", [[256], [250], [100, 64, 30], [900]], ids=str)
@pytest.mark.parametrize("stage", ["admitted", "allocated", "completed"])
def test_whatever_stage_a_chunk_reached_everything_is_as_before(
    window_pool: bool, lengths: list[int], stage: str
) -> None:
    from engine_hooks.freetoken.state import Before

    scheduler = scheduler_of("swa_radix" if window_pool else "radix", window_pool)
    before = digest(scheduler)
    noted = Before(scheduler)
    for _ in range(2):  # a second run starts from what the first one put back
        noted.keep_rows(len(lengths))
        reqs = begin(scheduler, lengths)
        scheduler._forward_iter += 1
        if stage != "admitted":
            scheduler.cache_manager.allocate_paged(reqs)
            assert digest(scheduler) != before
        if stage == "completed":
            for req in reqs:
                req.complete_one()
        noted.restore(reqs)
        assert digest(scheduler) == before
    scheduler.cache_manager.check_integrity()


def test_the_lists_are_put_back_even_if_the_device_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_hooks.freetoken.state import Before

    scheduler = scheduler_of("radix", False)
    before = digest(scheduler)
    noted = Before(scheduler)
    noted.keep_rows(1)
    reqs = begin(scheduler, [256])
    scheduler.cache_manager.allocate_paged(reqs)

    def refuse(handle: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(scheduler.cache_manager, "unlock", refuse)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        noted.restore(reqs)
    after = digest(scheduler)
    assert {name: after[name] for name in ("free_slots", "rows", "pending", "iteration")} == {
        name: before[name] for name in ("free_slots", "rows", "pending", "iteration")
    }
