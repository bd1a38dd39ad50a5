"""Sizes of the tensors that an object reaches, each storage once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def added(root: Any, seen: dict[int, int], packages: tuple[str, ...]) -> int:
    """Bytes of the storages below ``root`` that are not in ``seen`` (address -> bytes), which they are added to."""
    before = sum(seen.values())
    for tensor in device_tensors(root, packages):
        start = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
        seen.setdefault(start, int(tensor.untyped_storage().nbytes()))
    return sum(seen.values()) - before


def device_tensors(root: Any, packages: tuple[str, ...]) -> Iterator[Any]:
    """Every CUDA tensor that ``root`` reaches through containers and objects of ``packages``."""
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
        elif type(value).__module__.startswith(packages):
            waiting += _members(value)


def _members(value: Any) -> list[Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
