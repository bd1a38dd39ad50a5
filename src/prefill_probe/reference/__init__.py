"""The reference engine: a small hybrid model with real kernels, for a machine without an engine.

GDN by flash-linear-attention, attention by torch over a paged KV pool, MoE by a Triton kernel of this package; random
bf16 weights of a model's real geometry, with few layers that share one set of experts. It needs no engine installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from prefill_probe.virtual.errors import MissingError, ModelError, StartError

if TYPE_CHECKING:
    from prefill_probe.record import ProbeRecord
    from prefill_probe.reference.engine import ReferenceEngine
    from prefill_probe.settings import ProbeSettings
    from prefill_probe.virtual.device import Card

LAYERS = 4


def booted_reference(
    model: str | None = None,
    *,
    layers: int = LAYERS,
    memory_ratio: float | None = None,
    max_prefill_length: int | None = None,
    max_running_requests: int | None = None,
    device: str = "cuda",
) -> ReferenceEngine:
    """A reference engine at the end of its start, on a GPU or inside ``virtual_gpu``.

    Args:
        model: a directory with a ``config.json``; None: the Flash-Next geometry that ships with the package.
        layers: of the model's layers, the first so many.
        memory_ratio, max_prefill_length, max_running_requests: as ``engine.Flags``, whose defaults stand for None.

    Raises:
        ModelError: a model that cannot be built; one line.
        StartError: it does not start, for lack of memory; one line.
        MissingError: Triton or flash-linear-attention is not installed.
    """
    from prefill_probe.reference.config import load_config

    config = load_config(model, layers=layers)

    import torch

    from prefill_probe.engine import PlanRefused

    try:
        from prefill_probe.reference.engine import Flags, ReferenceEngine
    except ModuleNotFoundError as missing:
        raise MissingError(f"the reference engine needs {missing.name}, which is not installed here") from missing
    given = {
        "memory_ratio": memory_ratio,
        "max_prefill_length": max_prefill_length,
        "max_running_requests": max_running_requests,
    }
    flags = Flags(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    where = torch.device(device, torch.cuda.current_device())
    with contextlib.suppress(Exception):  # as engines do; a torch that refuses has larger segments, and they are seen
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        return ReferenceEngine(config, flags, where)
    except torch.OutOfMemoryError as error:
        raise StartError(f"does not fit: the engine does not start: {str(error).splitlines()[0]}") from error
    except PlanRefused as refusal:
        raise StartError(f"the engine refuses this configuration: {refusal}") from refusal


def check_reference(
    settings: ProbeSettings,
    *,
    model: str | None = None,
    layers: int = LAYERS,
    memory_ratio: float | None = None,
    max_prefill_length: int | None = None,
    max_running_requests: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[ProbeRecord], None] = lambda record: None,
) -> ProbeRecord:
    """The probe's record of the reference engine on this machine's GPU.

    Args:
        settings, progress, keep: of ``probe``.
        others: of ``booted_reference``.

    Raises:
        ModelError, StartError, MissingError: as ``booted_reference``; MissingError also where no CUDA GPU answers.
    """
    import torch

    from prefill_probe._probe import probe

    if not torch.cuda.is_available():
        raise MissingError("no CUDA GPU answers on this machine; prefill-probe estimate needs none")
    engine = booted_reference(
        model,
        layers=layers,
        memory_ratio=memory_ratio,
        max_prefill_length=max_prefill_length,
        max_running_requests=max_running_requests,
    )
    return probe(engine, settings, progress, keep)


def estimate_reference(
    card: Card,
    settings: ProbeSettings,
    *,
    model: str | None = None,
    layers: int = LAYERS,
    memory_ratio: float | None = None,
    max_prefill_length: int | None = None,
    max_running_requests: int | None = None,
) -> ProbeRecord:
    """The same on a virtual GPU. Use a process of its own: the kernels' library is imported to stay, and believes in
    this GPU.

    Raises:
        ModelError, StartError, MissingError: as ``booted_reference``.
        UntraceableError: an operator that cannot be traced.
    """
    from prefill_probe.reference.config import load_config

    load_config(model, layers=layers)  # what is wrong with it is said at once

    from prefill_probe._probe import probe
    from prefill_probe.virtual import virtual_gpu
    from prefill_probe.virtual.records import as_virtual

    with contextlib.ExitStack() as stack:
        device = stack.enter_context(virtual_gpu(card))
        engine = booted_reference(
            model,
            layers=layers,
            memory_ratio=memory_ratio,
            max_prefill_length=max_prefill_length,
            max_running_requests=max_running_requests,
        )
        engine.meter.timed = False
        return as_virtual(probe(engine, settings), device)


__all__ = [
    "LAYERS",
    "MissingError",
    "ModelError",
    "StartError",
    "booted_reference",
    "check_reference",
    "estimate_reference",
]
