"""FreeToken on a virtual GPU: its scheduler is built and run as on a real one, but for kernels and weights.

What is answered here is what reaches beside torch and Triton:

* kernels in C++ and CUDA, which the engine compiles or loads: modules whose functions do nothing;
* host memory that is pinned for the device: nothing is pinned;
* the weights: dummies, which have no contents (of compressed ones ``compressed`` knows the size).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed

from engine_hooks.freetoken import compressed
from engine_hooks.freetoken.engine import FreeTokenEngine
from engine_hooks.freetoken.planner import tap
from prefill_probe import record as records
from prefill_probe._probe import probe
from prefill_probe.settings import ProbeSettings
from prefill_probe.virtual import model_directory, virtual_gpu
from prefill_probe.virtual.device import Card, Device
from prefill_probe.virtual.errors import ModelError, StartError, StartFault
from prefill_probe.virtual.records import as_virtual


def estimate_serve(
    arguments: Sequence[str], card: Card, settings: ProbeSettings, *, verbose: bool = False
) -> records.ProbeRecord:
    """The probe's record of ``ft serve`` with ``arguments`` on a virtual GPU.

    The engine's own parser, planner, scheduler and model run; so does the probe. Use a process of its own: the engine
    is imported to stay, and believes in this GPU.

    Args:
        verbose: show the engine's log, on standard error.

    Raises:
        ModelError: the command line or the model directory cannot be read.
        StartError: the engine does not start, for lack of memory or because it refuses the configuration.
        StartFault: it fails in another way.
        UntraceableError: an operator that cannot be traced.
    """
    with started(arguments, card, verbose=verbose) as (engine, device):
        return as_virtual(probe(engine, settings), device)


@contextlib.contextmanager
def started(arguments: Sequence[str], card: Card, *, verbose: bool = False) -> Iterator[tuple[FreeTokenEngine, Device]]:
    """The engine of ``ft serve`` with ``arguments`` at the end of its start, on a virtual GPU; raises as above."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not verbose:
            disabled = logging.root.manager.disable
            logging.disable(logging.WARNING)
            stack.callback(logging.disable, disabled)
        device = stack.enter_context(virtual_gpu(card))
        config = parsed(arguments)
        if not verbose:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # progress bars
        engine = stack.enter_context(booted(config))
        engine.meter.timed = False
        yield engine, device


def parsed(arguments: Sequence[str]) -> Any:
    """The engine's own reading of a command line.

    Raises:
        ModelError: the model directory is none, or the engine does not know its architecture.
    """
    named = [
        value or following
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True)
        for flag, _, value in [argument.partition("=")]
        if flag in ("--model", "--model-path")
    ]
    if named:
        model_directory.checked(named[-1])
    from freetoken.server.args import parse_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config, _ = parse_args(list(arguments), prog="ft serve")
        config.model_config  # noqa: B018  (read from config.json here, or it is the boot that fails)
    except SystemExit as ended:
        if not ended.code:
            raise  # --help
        raise ModelError((said.getvalue().strip().splitlines() or ["ft serve does not accept this"])[-1]) from None
    except KeyError as error:
        raise ModelError(f"config.json: the key {error} is missing") from None
    except (AttributeError, TypeError, ValueError, OSError, NotImplementedError) as error:
        raise ModelError(f"config.json: {_first_line(error)}") from None
    if config.tp_info.size > 1:
        raise ModelError(f"--tensor-parallel-size {config.tp_info.size}: an estimate has one GPU; give 1")
    return config


def _first_line(error: BaseException) -> str:
    """What an error says, in one line; one that says nothing, by its name and place."""
    text = str(error).strip()
    if text:
        return text.splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {Path(frames[-1].filename).name}:{frames[-1].lineno}"


@contextlib.contextmanager
def booted(config: Any) -> Iterator[FreeTokenEngine]:
    """A scheduler of ``config`` at the end of its start, as the probe's engine; call it inside ``virtual_gpu``.

    Args:
        config: a ``SchedulerConfig``; ``ServerArgs`` is one. Its weights are replaced by dummies.

    Raises:
        StartError: the engine does not start, for lack of memory or because it refuses the configuration.
        StartFault: it fails in another way.
    """
    from freetoken.scheduler import Scheduler

    config = replace(config, use_dummy_weight=True, offline_mode=True)
    with answered(), compressed.answered(config), mock.patch.dict(os.environ, PREFILL_PROBE="off"):
        try:
            try:
                with tap(config) as noted:
                    scheduler = Scheduler(config)
            except torch.OutOfMemoryError as error:
                raise StartError(f"does not fit: the engine does not start: {_first_line(error)}") from error
            except (AssertionError, ValueError, RuntimeError) as error:
                raise StartError(f"the engine refuses this configuration: {_first_line(error)}") from error
            except Exception as error:
                raise StartFault(f"the engine's start fails: {type(error).__name__}: {_first_line(error)}") from error
            yield FreeTokenEngine(scheduler, noted)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


_init_process_group = torch.distributed.init_process_group


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
    module: Any = _Inert("freetoken.kernel._pinned_tensor")
    module.create_pinned_tensor_like = torch.empty_like
    module.alloc_pinned_tensor = lambda shape, dtype: torch.empty(shape, dtype=dtype)
    module.host_ptr_identity = lambda: True
    module.driver_cuda_version = lambda: 13000
    return module  # type: ignore[no-any-return]


def _process_group(*args: Any, world_size: int = 1, **kwargs: Any) -> None:
    """The engine's own group of ranks; that of one process listens on no port."""
    if world_size > 1:
        _init_process_group(*args, world_size=world_size, **kwargs)
    else:
        _init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())


class _Communicator:
    """NCCL's: ranks wait for one another as there, and nothing is sent."""

    def all_reduce(self, values: Any, operation: str) -> None:
        torch.distributed.barrier()

    def all_gather(self, output: Any, values: Any) -> None:
        torch.distributed.barrier()


@contextlib.contextmanager
def answered() -> Iterator[None]:
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
        stack.enter_context(mock.patch.object(torch.distributed, "init_process_group", _process_group))
        kernels = importlib.import_module("freetoken.kernel")
        stack.enter_context(mock.patch.object(kernels, "init_pynccl", return_value=_Communicator()))
        if importlib.util.find_spec("freetoken.gpu_select"):  # from 0.1.3 on: a rank's GPU is the one that it has here
            gpus = importlib.import_module("freetoken.gpu_select")
            stack.enter_context(mock.patch.object(gpus, "bind_assigned_gpu", return_value=torch.device("cuda", 0)))
        graphs = importlib.import_module("freetoken.engine.graph")
        if hasattr(graphs, "_cu_graph_upload"):  # from 0.2.0 on: the driver's own library, by name
            stack.enter_context(mock.patch.object(graphs, "_cu_graph_upload", return_value=None))
        yield
