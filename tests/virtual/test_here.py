"""The card of this machine, as a driver and an NVML that are not there say."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from prefill_probe.sizes import GIB
from prefill_probe.virtual import here

ATTRIBUTES = {16: 84, 18: 0, 75: 12, 76: 0, 97: 101_376}


class Driver:
    """libcuda with one GPU; no function makes a context."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 7
        return 0 if ordinal == 0 else 101

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"A card"
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: Any) -> int:
        total._obj.value = 16 * GIB
        return 0

    def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:
        uuid.raw = bytes(range(16))
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:
        assert device.value == 7
        value._obj.value = ATTRIBUTES[number]
        return 0


class Nvml:
    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f" else 6

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free, memory._obj.used = 17 * GIB, 15 * GIB, 2 * GIB
        return 0


def libraries(monkeypatch: pytest.MonkeyPatch, **found: object) -> None:
    def load(name: str) -> object:
        library = found.get(name.split(".")[0].replace("-", "_"))
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_what_is_free_of_it_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, libcuda=Driver(), libnvidia_ml=Nvml())
    card = here.card_here()
    assert (card.name, card.total_bytes, card.usable_bytes) == ("A card", 16 * GIB, 15 * GIB)
    assert (card.capability, card.multiprocessors, card.shared_bytes) == ((12, 0), 84, 101_376)
    assert card.integrated is False


def test_all_of_it_is_usable_where_nvml_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, libcuda=Driver())
    assert here.card_here().usable_bytes == 16 * GIB


def test_a_machine_without_a_driver_or_without_that_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, libcuda=Driver())
    with pytest.raises(OSError, match="error 101"):
        here.card_here(3)
    libraries(monkeypatch)
    with pytest.raises(OSError, match=r"libcuda\.so"):
        here.card_here()
