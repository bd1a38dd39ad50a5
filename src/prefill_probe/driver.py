"""This machine's GPUs, as the driver's libraries describe them: nothing of CUDA is started, no context is made.

free = free_bytes()      # before anything of this start is on the GPU
card = card_at("0", free)
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from prefill_probe.virtual.device import Card

# CUdevice_attribute (cuda.h).
_MULTIPROCESSORS, _INTEGRATED, _MAJOR, _MINOR, _SHARED_BYTES = 16, 18, 75, 76, 97


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def count() -> int:
    """How many GPUs CUDA sees in this environment; 0 where no driver answers."""
    try:
        return _number(_cuda().cuDeviceGetCount)
    except (OSError, AttributeError):
        return 0


def card_here() -> Card:
    """The first GPU that CUDA sees; what is free of it now is usable.

    Raises:
        OSError: no driver, or no GPU.
    """
    return card_at("0", free_bytes())


def card_at(which: str, free: Mapping[str, int]) -> Card:
    """The GPU that CUDA would use for ``which``.

    Args:
        which: an ordinal among the devices that CUDA sees in this environment, or a UUID or the beginning of one.
        free: bytes by UUID (``free_bytes``), which are usable; a card that is not in it counts as free.

    Raises:
        OSError: no driver, or no such GPU.
    """
    try:
        cuda = _cuda()
        for index in range(_number(cuda.cuDeviceGetCount)):
            device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            _ask(cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)))
            _ask(cuda.cuDeviceGetUuid(ctypes.byref(uuid), device))
            name = f"GPU-{UUID(bytes=bytes(uuid))}"
            if which == str(index) or name.upper().startswith(which.upper()):
                return _described(cuda, device, free.get(name))
    except AttributeError as error:  # a driver that is too old
        raise OSError(f"the CUDA driver lacks {error}") from None
    raise OSError(f"the CUDA driver knows no GPU {which}")


def free_bytes() -> dict[str, int]:
    """Free memory of each GPU by UUID (``GPU-...``); a GPU of which NVML does not say it is not among them."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, AttributeError), _nvml() as nvml:
        for index in range(_number(nvml.nvmlDeviceGetCount_v2)):
            with contextlib.suppress(OSError):
                device, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
                _ask(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)))
                _ask(nvml.nvmlDeviceGetUUID(device, name, ctypes.c_uint(96)))
                _ask(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
                found[name.value.decode("ascii", "replace")] = int(memory.free)
    return found


def _described(cuda: Any, device: ctypes.c_int, free: int | None) -> Card:
    total, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _ask(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    _ask(cuda.cuDeviceGetName(name, ctypes.c_int(256), device))

    def attribute(number: int) -> int:
        return _number(cuda.cuDeviceGetAttribute, ctypes.c_int(number), device)

    return Card(
        name=name.value.decode("utf-8", "replace"),
        total_bytes=total.value,
        usable_bytes=total.value if free is None else min(free, total.value),
        capability=(attribute(_MAJOR), attribute(_MINOR)),
        multiprocessors=attribute(_MULTIPROCESSORS),
        shared_bytes=attribute(_SHARED_BYTES),
        integrated=bool(attribute(_INTEGRATED)),
    )


def _cuda() -> Any:
    cuda = ctypes.CDLL("libcuda.so.1")
    _ask(cuda.cuInit(ctypes.c_uint(0)))
    return cuda


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    _ask(nvml.nvmlInit_v2())
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _number(call: Any, *arguments: Any) -> int:
    value = ctypes.c_int()
    _ask(call(ctypes.byref(value), *arguments))
    return value.value


def _ask(status: int) -> None:
    """Raises ``OSError`` unless ``status`` is success."""
    if status != 0:
        raise OSError(f"the driver answers with error {status}")
