"""What an engine holds on the device when it is idle: the sizes of its own tensors, by component."""

from __future__ import annotations

from typing import Any

from prefill_probe.holdings import added

# Objects of these packages are looked into; all others are not the engine's.
_PACKAGES = ("freetoken", "torch.nn", "transformers")


def holdings(engine: Any, graph_bytes: int) -> dict[str, int]:
    """Bytes by component (``record.Held``); a storage that several reach is the first one's.

    Args:
        engine: ``freetoken.engine.Engine``.
        graph_bytes: of the private pools of its captured graphs.
    """
    runner = engine.graph_runner
    seen: dict[int, int] = {}
    sizes = {
        # Pools before the model, whose layers refer to some of them.
        "kv_pool": added(engine.kv_cache, seen, _PACKAGES),
        "state_pool": added(engine.linear_state_pool, seen, _PACKAGES),
        "expert_cache": added(engine.moe_offload_cache, seen, _PACKAGES),
        "graphs": graph_bytes + added((getattr(runner, "buffer", None), engine.attn_backend), seen, _PACKAGES),
        "weights": added(engine.model, seen, _PACKAGES),
    }
    return {name: sizes[name] for name in ("weights", "expert_cache", "kv_pool", "state_pool", "graphs")}


def decoder_layers(model: Any) -> list[Any]:
    """The model's layers in order; empty where they are not kept in a list of the engine's own kind."""
    inner = getattr(model, "model", model)
    return list(getattr(getattr(inner, "layers", None), "op_list", ()))
