"""This machine's GPUs by the driver's libraries: nothing of CUDA is started, no context is made.

free = free_bytes()      # before anything of this start is on the GPU
card = card_at("0", free)
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from prefill_probe.virtual.cards import card_of
from prefill_probe.virtual.device import Card

# CUdevice_attribute (cuda.h).
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97


class _Refused(Exception):
    """A call that did not answer with success."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes() -> dict[str, int]:
    """Free memory of each GPU by UUID (``GPU-...``); empty where NVML does not say."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, AttributeError, _Refused):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        with _session(nvml):
            count = ctypes.c_uint()
            _ask(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
            for index in range(count.value):
                device, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
                _ask(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)))
                _ask(nvml.nvmlDeviceGetUUID(device, name, ctypes.c_uint(96)))
                _ask(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
                found[name.value.decode("ascii", "replace")] = int(memory.free)
    return found


def card_at(which: str, free: Mapping[str, int]) -> Card | None:
    """The GPU that CUDA would use for ``which``; None where there is none, or the driver does not answer.

    Args:
        which: an ordinal among the devices that CUDA sees in this environment, or a UUID or the beginning of one.
        free: by UUID (``free_bytes``); a card that is not in it counts as free.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        _ask(cuda.cuInit(ctypes.c_uint(0)))
        for index in range(_number(cuda.cuDeviceGetCount)):
            device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            _ask(cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)))
            _ask(cuda.cuDeviceGetUuid(ctypes.byref(uuid), device))
            name = f"GPU-{UUID(bytes=bytes(uuid))}"
            if which == str(index) or name.upper().startswith(which.upper()):
                return _described(cuda, device, free.get(name))
    except (OSError, AttributeError, _Refused):
        pass
    return None


def _described(cuda: Any, device: ctypes.c_int, free: int | None) -> Card:
    total, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _ask(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    _ask(cuda.cuDeviceGetName(name, ctypes.c_int(256), device))
    multiprocessors, major, minor, shared = (
        _number(cuda.cuDeviceGetAttribute, ctypes.c_int(attribute), device)
        for attribute in (_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_OPTIN)
    )
    return replace(
        card_of(total.value, (major, minor), name.value.decode("ascii", "replace")),
        usable_bytes=total.value if free is None else min(free, total.value),
        multiprocessors=multiprocessors,
        shared_bytes=shared,
    )


@contextlib.contextmanager
def _session(nvml: Any) -> Iterator[None]:
    _ask(nvml.nvmlInit_v2())
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _number(call: Any, *arguments: Any) -> int:
    value = ctypes.c_int()
    _ask(call(ctypes.byref(value), *arguments))
    return value.value


def _ask(status: int) -> None:
    """Raises ``_Refused`` unless ``status`` is success."""
    if status != 0:
        raise _Refused(status)
