"""What a decoder layer is made of, so that layers of one kind are recognised, whatever their configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Pools and caches hang on some layers, and belong to all.
_SHARED = ("freetoken.kvcache", "freetoken.moe.offload_cache", "freetoken.core")
_DEEPEST = 8


def layer_kinds(layers: Sequence[Any], model_config: Any) -> list[Any]:
    """Of each layer something that is equal for layers of one kind: its attention group, and its parts by class with
    the shapes and types of their tensors.

    Args:
        layers: the model's decoder layers, in order.
        model_config: ``freetoken.models.config.ModelConfig``.
    """
    groups = getattr(model_config, "attention_groups", ())
    return [
        (tuple(group.name for group in groups if number in group.layer_ids), _made_of(layer, _DEEPEST))
        for number, layer in enumerate(layers)
    ]


def fewest_layers(kinds: Sequence[Any]) -> int:
    """How many first layers there must be for every kind to be among them."""
    return max(kinds.index(kind) for kind in kinds) + 1


def _made_of(value: Any, deepest: int) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if value is None or isinstance(value, bool):
        return value
    module = type(value).__module__
    if deepest == 0 or module.startswith(_SHARED):
        return type(value).__qualname__
    if isinstance(value, dict):
        return tuple((str(name), _made_of(each, deepest - 1)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_made_of(each, deepest - 1) for each in value)
    if module.startswith(("freetoken", "torch.nn")):
        parts = getattr(value, "__dict__", {})
        return type(value).__qualname__, tuple((name, _made_of(each, deepest - 1)) for name, each in parts.items())
    return type(value).__qualname__  # of numbers and words, some are the layer's own
