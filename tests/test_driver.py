"""The driver's libraries, played by functions that answer as they would for two cards."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from prefill_probe import driver
from prefill_probe.sizes import GIB, MIB

UUIDS = [UUID(int=1), UUID(int=2)]
NAMES = [b"NVIDIA L4", b"NVIDIA GeForce RTX 5080"]
ATTRIBUTES = [{16: 58, 75: 8, 76: 9, 97: 101_376}, {16: 84, 75: 12, 76: 0, 97: 101_376}]


def put(reference: Any, value: Any) -> int:
    reference._obj.value = value
    return 0


def attribute(reference: Any, which: Any, device: Any) -> int:
    return put(reference, ATTRIBUTES[device.value][which.value])


def uuid(reference: Any, device: Any) -> int:
    reference._obj[:] = list(UUIDS[device.value].bytes)
    return 0


def name(buffer: Any, size: Any, device: Any) -> int:
    buffer.value = NAMES[device.value]
    return 0


CUDA = SimpleNamespace(
    cuInit=lambda flags: 0,
    cuDeviceGetCount=lambda count: put(count, 2),
    cuDeviceGet=lambda device, index: put(device, index.value),
    cuDeviceGetUuid=uuid,
    cuDeviceTotalMem_v2=lambda total, device: put(total, 16 * GIB),
    cuDeviceGetName=name,
    cuDeviceGetAttribute=attribute,
)


def memory(device: Any, reference: Any) -> int:
    reference._obj.free = (device.value + 1) * GIB
    return 0


def nvml_uuid(device: Any, buffer: Any, size: Any) -> int:
    buffer.value = f"GPU-{UUIDS[device.value - 1]}".encode()
    return 0


NVML = SimpleNamespace(
    nvmlInit_v2=lambda: 0,
    nvmlShutdown=lambda: 0,
    nvmlDeviceGetCount_v2=lambda count: put(count, 2),
    nvmlDeviceGetHandleByIndex_v2=lambda index, device: put(device, index.value + 1),
    nvmlDeviceGetUUID=nvml_uuid,
    nvmlDeviceGetMemoryInfo=memory,
)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By file name; what is not there cannot be loaded."""
    found: dict[str, Any] = {"libcuda.so.1": CUDA, "libnvidia-ml.so.1": NVML}

    def load(file: str) -> Any:
        if file not in found:
            raise OSError(file)
        return found[file]

    monkeypatch.setattr(ctypes, "CDLL", load)
    return found


def test_a_card_is_what_the_driver_says_of_it(libraries: dict[str, Any]) -> None:
    card = driver.card_at("1", {})
    assert card is not None
    assert (card.name, card.capability, card.multiprocessors) == ("NVIDIA GeForce RTX 5080", (12, 0), 84)
    assert (card.total_bytes, card.usable_bytes) == (16 * GIB, 16 * GIB)


def test_it_is_found_by_ordinal_and_by_the_beginning_of_its_uuid(libraries: dict[str, Any]) -> None:
    for which in ("0", f"GPU-{UUIDS[0]}", f"gpu-{UUIDS[0]}", f"GPU-{UUIDS[0]}"[:-1] + "1"):
        card = driver.card_at(which, {})
        assert card is not None
        assert card.name == "NVIDIA L4"
    assert driver.card_at("2", {}) is None
    assert driver.card_at("GPU-ffff", {}) is None


def test_what_is_free_is_that_of_the_same_card_and_never_more_than_there_is(libraries: dict[str, Any]) -> None:
    free = driver.free_bytes()
    assert free == {f"GPU-{UUIDS[0]}": 2 * GIB, f"GPU-{UUIDS[1]}": 3 * GIB}
    card = driver.card_at("1", free)
    assert card is not None
    assert card.usable_bytes == 3 * GIB
    card = driver.card_at("1", {f"GPU-{UUIDS[1]}": 17 * GIB, f"GPU-{UUIDS[0]}": MIB})
    assert card is not None
    assert card.usable_bytes == 16 * GIB


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetAttribute"])
def test_a_driver_that_refuses_has_no_card(libraries: dict[str, Any], call: str) -> None:
    libraries["libcuda.so.1"] = SimpleNamespace(**{**vars(CUDA), call: lambda *arguments: 100})
    assert driver.card_at("0", {}) is None


def test_without_its_libraries_nothing_is_known(libraries: dict[str, Any]) -> None:
    libraries.clear()
    assert driver.free_bytes() == {}
    assert driver.card_at("0", {}) is None
    libraries["libnvidia-ml.so.1"] = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlShutdown=lambda: 0)
    assert driver.free_bytes() == {}
