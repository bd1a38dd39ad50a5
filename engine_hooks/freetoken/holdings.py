"""What an engine holds on the device when it is idle: the sizes of its own tensors, by component."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
        "kv_pool": _added(engine.kv_cache, seen),
        "state_pool": _added(engine.linear_state_pool, seen),
        "expert_cache": _added(engine.moe_offload_cache, seen),
        "graphs": graph_bytes + _added((getattr(runner, "buffer", None), engine.attn_backend), seen),
        "weights": _added(engine.model, seen),
    }
    return {name: sizes[name] for name in ("weights", "expert_cache", "kv_pool", "state_pool", "graphs")}


def _added(root: Any, seen: dict[int, int]) -> int:
    """Bytes of the storages below ``root`` that are not in ``seen`` (address -> bytes), which they are added to."""
    before = sum(seen.values())
    for tensor in device_tensors(root):
        start = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
        seen.setdefault(start, int(tensor.untyped_storage().nbytes()))
    return sum(seen.values()) - before


def device_tensors(root: Any) -> Iterator[Any]:
    """Every CUDA tensor that ``root`` reaches through containers and the engine's own objects."""
    import torch

    known: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_cuda and value.numel():
                yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif type(value).__module__.startswith(_PACKAGES):
            waiting += _members(value)


def _members(value: Any) -> list[Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
