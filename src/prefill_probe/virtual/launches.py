"""Triton kernels on the virtual GPU: a launch does nothing, whatever compiles, tunes or chooses it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from prefill_probe.virtual.device import Card


class _Driver:
    """What Triton asks its driver about the device."""

    def __init__(self, card: Card) -> None:
        self._target = _target(card)
        properties = {
            "max_shared_mem": card.shared_bytes,
            "multiprocessor_count": card.multiprocessors,
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 2_000_000,
            "mem_clock_rate": 2_000_000,
            "mem_bus_width": 256,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def set_current_device(self, device: int) -> None:
        pass

    def is_active(self) -> bool:
        return True


def _target(card: Card) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", card.capability[0] * 10 + card.capability[1], 32)


@contextlib.contextmanager
def answered(card: Card) -> Iterator[None]:
    """Triton's launches do nothing while the block runs; without Triton there is nothing to answer."""
    try:
        from triton.runtime import autotuner, driver, jit
    except ImportError:
        yield
        return

    def launch(*_: Any, **__: Any) -> None:
        pass

    with contextlib.ExitStack() as stack:
        for owner in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
            stack.enter_context(mock.patch.object(owner, "run", launch))
        stack.enter_context(mock.patch.object(type(driver), "active", _Driver(card)))
        yield
