"""Dummy weights whose activations stay finite, so that tokens vary with the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tame_weights(weights: Mapping[str, Any]) -> None:
    """Scale weights that were drawn with deviation 1 down, in place: matrices by their inner size; norms become 1."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.dim() >= 2 and tensor.dtype.itemsize >= 2:
            tensor.mul_(tensor.shape[-1] ** -0.5)
        elif "norm" in name and tensor.is_floating_point():
            tensor.fill_(1.0)
