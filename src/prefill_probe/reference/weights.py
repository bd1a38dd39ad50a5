"""Random weights: every model of a geometry needs the same memory, whatever its weights are."""

from __future__ import annotations

import torch


def matrix(*shape: int, device: torch.device) -> torch.Tensor:
    """bf16, normal, so that a product with it keeps the size of what it is applied to (last dimension)."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, shape[-1] ** -0.5)


def ones(size: int, device: torch.device) -> torch.Tensor:
    """bf16, of a norm."""
    return torch.ones(size, dtype=torch.bfloat16, device=device)


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that ``root``, an object of the reference engine, holds, each once."""
    found: dict[int, int] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value.numel() * value.element_size()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif type(value).__module__.startswith(__package__ or ""):
            waiting += vars(value).values()
    return sum(found.values())
