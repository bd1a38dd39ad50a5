"""Everything of a FreeToken engine that a chunk may touch, as far as it is not free memory; for comparing."""

from __future__ import annotations

import gc
import hashlib
from typing import Any

# What a step plans for itself, and every step plans anew.
SCRATCH = {"evict_slots", "src_indices", "num_missing_full", "_pending_src_layer"}
SCRATCH |= {"_prefill_hit_dst", "_prefill_hit_src", "_prefill_hit_num"}


def _keeps_books(value: Any) -> bool:
    import torch

    whole = (torch.int32, torch.int64, torch.bool)
    return value.dtype in whole if isinstance(value, torch.Tensor) else type(value) is int


def digest(llm: Any) -> dict[str, Any]:
    """Hashes, lists and counts of an idle scheduler, the same before and after a chunk that left no trace."""
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    # Before anything below allocates.
    memory = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "blocks": torch.cuda.memory_stats().get("active.all.current"),
        "tensors": sum(isinstance(each, torch.Tensor) and each.is_cuda for each in gc.get_objects()),
    }
    engine, cache, tables = llm.engine, llm.cache_manager, llm.table_manager
    cache.check_integrity()
    pool = engine.linear_state_pool

    def content(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()[:16]

    experts = engine.moe_offload_cache
    return {
        "free_pages": content(cache.free_slots),
        "page_table": content(tables.page_table),
        "token_pool": content(llm.token_pool),
        "rows": list(tables._free_slots),
        "state_free": content(getattr(pool, "_free_slots", getattr(pool, "free_slots", None))),
        # Slot 0 belongs to no request: rows of a captured decode step that no request uses write there.
        "state": [content(pool.conv_states[:, 1:]), content(pool.recurrent_states[:, 1:])],
        "tree": cache.available_size,
        "pending": len(llm.prefill_manager.pending_list),
        "running": len(llm.decode_manager.running_reqs),
        "experts": {
            name: content(value) for name, value in vars(experts).items() if name not in SCRATCH and _keeps_books(value)
        },
        "rng": [content(torch.get_rng_state()), content(torch.cuda.get_rng_state())],
        "stream": torch.cuda.current_stream().cuda_stream,
        "config": content(llm.config),
        "iteration": llm._forward_iter,
        **memory,
    }


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What changed. The GDN kernels' own cache keeps the last few index lists: a handful of tensors come and go."""
    allowed = {"tensors": 6, "blocks": 6, "allocated": 6 * 512}

    def same(name: str) -> bool:
        if name in allowed and before[name] is not None:
            return bool(abs(before[name] - after[name]) <= allowed[name])
        return bool(before[name] == after[name])

    return [f"{name}: {before[name]} -> {after[name]}" for name in before if not same(name)]
