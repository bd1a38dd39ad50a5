"""What the hook takes for granted of FreeToken, and which versions were read to know it.

The contract is the one place that names FreeToken's internals by version. It is checked against the modules at hand
before anything is wrapped, and by a test against the published wheels.
"""

from __future__ import annotations

import inspect
from types import ModuleType

# Read, and run where a GPU was at hand. Another version is probed too, as long as it keeps the contract.
READ_VERSIONS = ("0.1.2", "0.1.3", "0.2.0", "0.2.1")

# Module -> qualified name -> parameters that the hook passes or relies on, in order, without self.
# None: any object of that name.
CONTRACT: dict[str, dict[str, tuple[str, ...] | None]] = {
    "freetoken.scheduler.scheduler": {
        "Scheduler.__init__": ("config",),
        "Scheduler._prepare_batch": ("batch",),
        "Scheduler._forward": ("forward_input",),
        "Scheduler._restore_linear_states": ("batch",),
        "Scheduler.rebuild_cache": ("moe_cache_size", "num_pages"),
        "Scheduler._process_one_msg": ("msg",),
    },
    "freetoken.scheduler.prefill": {
        "PrefillManager.add_one_req": ("req",),
        "PrefillManager.schedule_next_batch": ("prefill_budget",),
    },
    "freetoken.scheduler.cache": {
        "CacheManager.unlock": ("handle",),
        "CacheManager.allocate_paged": ("reqs",),
        "CacheManager.free_swa_out_of_window_extend": ("reqs",),
        "CacheManager.lazy_free_region": (),
    },
    "freetoken.scheduler.decode": {
        "DecodeManager.filter_reqs": ("reqs",),
        "DecodeManager.schedule_next_batch": (),
    },
    "freetoken.kvcache.linear_state_pool": {
        "LinearStatePool.clear_slots": ("slots",),
        "state_pool_bytes": ("config",),
    },
    "freetoken.moe.offload_cache": {"OffloadMoeCache.reset": ()},
    "freetoken.engine.engine": {
        "_startup_kv_budget": ("memory_ratio", "init_free_memory", "new_free_memory"),
        "CacheRebuildRejected": None,
        "GraphRunner": None,
    },
    "freetoken.engine.cache_budget": {
        "expert_bytes_per_slot": ("sources",),
        "resolve_moe_cache_auto": ("memory_ratio", "per_expert_bytes"),
    },
    "freetoken.layers.moe": {
        "MoELayer._resident_gemm": ("hidden_states", "topk_weights", "topk_ids"),
        "OffloadMoELayer._prefill_routed": ("hidden_states", "topk_weights", "topk_ids"),
    },
    "freetoken.kernel": {"fast_compare_key": ("x", "y")},
    "freetoken.utils": {"load_generation_sampling": None},
    "freetoken.message": {"UserMsg": None, "AbortBackendMsg": None, "ErrorReplyMsg": None},
    "freetoken.core": {"SamplingParams": None, "Req.complete_one": ()},
}

SERVER_CONTRACT: dict[str, dict[str, tuple[str, ...] | None]] = {
    "freetoken.server.args": {"parse_args": ("args", "run_shell", "prog"), "argparse": None, "ServerArgs": None},
    "freetoken.server.api_server": {
        "run_api_server": ("config", "start_backend", "run_shell"),
        "_exit_after_backend_death": ("grace_s",),
        "_reap_backend_workers": ("processes", "timeout"),
        "_terminate_backend_workers": ("processes",),
        "_GLOBAL_STATE": None,
        "FrontendManager": None,
        "app": None,
    },
}

# What the engine prints when it serves.
READY = "API server is ready to serve"

# Attributes of live objects, by the object they are read from; checked on the scheduler before it is probed.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "": (
        "prefill_budget",
        "prefill_manager",
        "cache_manager",
        "decode_manager",
        "table_manager",
        "token_pool",
        "stream",
        "engine_stream_ctx",
        "device",
        "config",
        "_forward_iter",
        "_pending_abort_acks",
        "_abort_tombstones",
    ),
    "prefill_manager": ("pending_list",),
    "decode_manager": ("running_reqs",),
    "cache_manager": ("free_slots", "page_size", "swa_pool", "is_hybrid", "prefix_cache", "supports_runtime_rebuild"),
    "table_manager": ("_free_slots", "page_table"),
    "engine": (
        "stream",
        "max_seq_len",
        "num_pages",
        "page_table",
        "linear_state_pool",
        "moe_offload_cache",
        "kv_cache",
        "tp_cpu_group",
        "_baseline_free",
        "_weights_bytes",
        "_pool_cls",
    ),
    "config": ("max_running_req", "memory_ratio", "max_extend_tokens", "model_config", "tp_info", "offline_mode"),
}


def _lookup(module: ModuleType, qualified: str) -> object:
    value: object = module
    for part in qualified.split("."):
        value = inspect.getattr_static(value, part)
    return value


def missing(modules: dict[str, ModuleType], contract: dict[str, dict[str, tuple[str, ...] | None]]) -> list[str]:
    """What ``modules`` lack of ``contract``, each as a name or a signature; empty if all is there.

    A module that is not in ``modules`` is not checked.
    """
    lacking = []
    for name, members in contract.items():
        module = modules.get(name)
        if module is None:
            continue
        for qualified, parameters in members.items():
            try:
                value = _lookup(module, qualified)
            except AttributeError:
                lacking.append(f"{name}.{qualified}")
                continue
            if parameters is None:
                continue
            found = [p for p in inspect.signature(value).parameters if p != "self"]  # type: ignore[arg-type]
            if not keeps(found, parameters):
                lacking.append(f"{name}.{qualified}({', '.join(parameters)})")
    return lacking


def keeps(found: list[str], parameters: tuple[str, ...]) -> bool:
    """Whether a function with parameters ``found`` has those of the contract, in the same order."""
    return tuple(name for name in found if name in parameters) == parameters


def missing_attributes(scheduler: object) -> list[str]:
    """What a live scheduler lacks of ``ATTRIBUTES``."""
    lacking = []
    for path, names in ATTRIBUTES.items():
        owner = getattr(scheduler, path, None) if path else scheduler
        if owner is None:
            lacking.append(path)
            continue
        lacking += [f"{path + '.' if path else ''}{name}" for name in names if not hasattr(owner, name)]
    return lacking
