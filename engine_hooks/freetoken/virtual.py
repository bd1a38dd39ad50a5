"""FreeToken on a virtual GPU: its scheduler is built and run as on a real one, but for kernels and weights.

What is answered here is what reaches beside torch and Triton:

* kernels in C++ and CUDA, which the engine compiles or loads: modules whose functions do nothing;
* host memory that is pinned for the device: nothing is pinned;
* the contents of weights and expert banks: nothing is read and nothing is filled, also in host memory.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from engine_hooks.freetoken.engine import FreeTokenEngine
from engine_hooks.freetoken.planner import tap


@contextlib.contextmanager
def booted(config: Any) -> Iterator[FreeTokenEngine]:
    """A scheduler of ``config`` at the end of its start, as the probe's engine; call it inside ``virtual_gpu``.

    Args:
        config: a ``SchedulerConfig``; ``ServerArgs`` is one. Its weights are replaced by dummies.
    """
    import torch.distributed
    from dataclasses import replace

    from freetoken.scheduler import Scheduler

    config = replace(config, use_dummy_weight=True, offline_mode=True)
    with _answered(), mock.patch.dict(os.environ, PREFILL_PROBE="off"):
        try:
            with tap(config) as noted:
                scheduler = Scheduler(config)
            yield FreeTokenEngine(scheduler, noted)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


class _Inert(ModuleType):
    """A compiled module whose functions do nothing and return nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _equal_prefix(x: Any, y: Any) -> int:
    """How many of their first elements two one-dimensional host tensors have in common."""
    length = min(len(x), len(y))
    differing = (x[:length] != y[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


def _module(*_: Any, **__: Any) -> ModuleType:
    module: Any = _Inert("virtual")
    module.fast_compare_key = _equal_prefix
    return module  # type: ignore[no-any-return]


def _pinned_extension() -> ModuleType:
    import torch

    module: Any = _Inert("freetoken.kernel._pinned_tensor")
    module.create_pinned_tensor_like = torch.empty_like
    module.alloc_pinned_tensor = lambda shape, dtype: torch.empty(shape, dtype=dtype)
    module.host_ptr_identity = lambda: True
    module.driver_cuda_version = lambda: 13000
    return module  # type: ignore[no-any-return]


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """The engine's own ways to the device and to host memory are answered while the block runs."""
    utils = importlib.import_module("freetoken.kernel.utils")
    # Modules bind the two loaders by name when they are imported, and cache what they loaded.
    loaded = {name: getattr(utils, name) for name in ("load_aot", "load_jit")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {"freetoken.kernel._pinned_tensor": _pinned_extension()}))
        stack.enter_context(mock.patch.object(utils, "load_aot", _module))
        stack.enter_context(mock.patch.object(utils, "load_jit", _module))
        for module in list(sys.modules.values()):
            if not getattr(module, "__name__", "").startswith("freetoken."):
                continue
            for name, original in loaded.items():
                if vars(module).get(name) is original:
                    stack.enter_context(mock.patch.object(module, name, _module))
        banks = importlib.import_module("freetoken.moe.expert_banks")
        stack.enter_context(mock.patch.object(banks, "_dummy_fill", lambda role, tensor: None))
        yield
