"""What a FreeToken engine on a virtual GPU says it holds, against its allocator and the engine's own formulas.

holdings.py MODEL     One JSON document on standard output. A process of its own: the engine is imported to stay.
"""

from __future__ import annotations

import gc
import json
import logging
import sys


def main() -> None:
    from engine_hooks.freetoken import holdings, virtual
    from prefill_probe.shape import full_chunk
    from prefill_probe.virtual import virtual_gpu
    from prefill_probe.virtual.cards import card_of

    logging.disable(logging.WARNING)
    serve = ["--model", sys.argv[1], "--max-running-requests", "4", "--cuda-graph-max-bs", "4", "--text-model-only"]
    serve += ["--moe-cache-size", "1024", "--memory-ratio", "0.8", "--max-prefill-length", "1024", "--dummy-weight"]
    with virtual_gpu(card_of(24 << 30, (9, 0))) as device:
        config = virtual.parsed(serve)
        with virtual.booted(config) as booted:
            import torch
            from freetoken.engine.cache_budget import expert_bytes_per_slot
            from freetoken.kvcache.linear_state_pool import state_pool_bytes

            scheduler = booted._scheduler
            engine = scheduler.engine
            gc.collect()
            torch.cuda.empty_cache()
            before = device.allocator.allocated
            per_page, fixed, _, _ = engine._pool_cls.kv_cost(engine.config)
            weights = {t.data_ptr(): t.nbytes for t in engine.model.state_dict().values() if t.is_cuda}
            tables = (engine.page_table, scheduler.token_pool, scheduler.cache_manager.free_slots)
            found = {
                "holdings": booted.holdings(),
                "allocated": device.allocator.allocated,
                "grown": device.allocator.allocated - before,
                "graph_pools": sum(device.allocator.graph_pools().values()),
                "workspaces": sum(block.size for block in device._workspaces.values()),
                "tables": sum(table.nbytes for table in tables),
                "page": per_page,
                "kv_formula": engine.num_pages * per_page + fixed,
                "state_formula": state_pool_bytes(engine.config),
                "slot": expert_bytes_per_slot(engine.moe_offload_cache.bank_sources),
                "state_dict": sum(weights.values()),
            }
            shape = full_chunk(booted.limits())
            with booted.meter.trace() as events, booted.layers() as marks:
                start = booted.meter.allocations()
                booted.run(shape)
            found["allocations"] = booted.meter.allocations() - start
            found["traced"] = sum(event["action"] == "alloc" for event in events)
            found["marks"] = marks
            found["left_wrapped"] = sum("forward" in vars(layer) for layer in holdings.decoder_layers(engine.model))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
