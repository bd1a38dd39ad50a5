"""The GPU of this machine as a ``Card``: the driver and NVML are asked, and no CUDA context is made."""

from __future__ import annotations

import ctypes
from typing import Any

from prefill_probe.virtual.device import Card

# CUdevice_attribute (cuda.h).
_MULTIPROCESSORS, _INTEGRATED, _MAJOR, _MINOR, _SHARED_BYTES = 16, 18, 75, 76, 97


def card_here(ordinal: int = 0) -> Card:
    """The GPU that is number ``ordinal`` for CUDA; what is free of it now is usable.

    Where NVML cannot say what is free, all of it is.

    Raises:
        OSError: no driver, or no such GPU.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name, uuid = ctypes.create_string_buffer(100), ctypes.create_string_buffer(16)
    _ask(driver.cuInit(0))
    _ask(driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _ask(driver.cuDeviceGetName(name, 100, device))
    _ask(driver.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    _ask(driver.cuDeviceGetUuid(uuid, device))

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _ask(driver.cuDeviceGetAttribute(ctypes.byref(value), number, device))
        return value.value

    return Card(
        name=name.value.decode(errors="replace"),
        total_bytes=total.value,
        usable_bytes=min(total.value, _free_bytes(uuid.raw.hex()) or total.value),
        capability=(attribute(_MAJOR), attribute(_MINOR)),
        multiprocessors=attribute(_MULTIPROCESSORS),
        shared_bytes=attribute(_SHARED_BYTES),
        integrated=bool(attribute(_INTEGRATED)),
    )


def _ask(status: int) -> None:
    if status != 0:
        raise OSError(f"the CUDA driver answers with error {status}")


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _free_bytes(uuid: str) -> int | None:
    """Free memory of the GPU with this UUID (32 hexadecimal digits); None where NVML cannot say."""
    parts = (uuid[0:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
    handle, memory = ctypes.c_void_p(), _Memory()
    try:
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            found = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{'-'.join(parts)}".encode(), ctypes.byref(handle))
            if found != 0 or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
                return None
            return int(memory.free)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
