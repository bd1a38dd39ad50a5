"""The driver's libraries, played by functions that answer as they would for two cards."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from prefill_probe import driver
from prefill_probe.sizes import GIB, MIB
from prefill_probe.virtual.device import Card

UUIDS = [UUID(int=1), UUID(int=2)]
NAMES = [b"NVIDIA L4", b"NVIDIA GeForce RTX 5080"]
ATTRIBUTES = [{16: 58, 18: 0, 75: 8, 76: 9, 97: 101_376}, {16: 84, 18: 1, 75: 12, 76: 0, 97: 99_328}]


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


# No function here makes a context.
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
            raise OSError(f"{file}: cannot open shared object file")
        return found[file]

    monkeypatch.setattr(ctypes, "CDLL", load)
    return found


def without(library: SimpleNamespace, call: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: value for name, value in vars(library).items() if name != call})


def test_a_card_is_what_the_driver_says_of_it(libraries: dict[str, Any]) -> None:
    assert driver.count() == 2
    assert driver.card_at("0", {}) == Card("NVIDIA L4", 16 * GIB, 16 * GIB, (8, 9), 58, 101_376, False)
    assert driver.card_at("1", {}) == Card("NVIDIA GeForce RTX 5080", 16 * GIB, 16 * GIB, (12, 0), 84, 99_328, True)


def test_it_is_found_by_ordinal_and_by_the_beginning_of_its_uuid(libraries: dict[str, Any]) -> None:
    for which in ("0", f"GPU-{UUIDS[0]}", f"gpu-{UUIDS[0]}", f"GPU-{UUIDS[0]}"[:-1] + "1"):
        assert driver.card_at(which, {}).name == "NVIDIA L4"
    for which in ("2", "GPU-ffff"):
        with pytest.raises(OSError, match=f"no GPU {which}"):
            driver.card_at(which, {})


def test_what_is_free_is_that_of_the_same_card_and_never_more_than_there_is(libraries: dict[str, Any]) -> None:
    free = driver.free_bytes()
    assert free == {f"GPU-{UUIDS[0]}": 2 * GIB, f"GPU-{UUIDS[1]}": 3 * GIB}
    assert driver.card_at("1", free).usable_bytes == 3 * GIB
    assert driver.card_here().usable_bytes == 2 * GIB
    assert driver.card_at("1", {f"GPU-{UUIDS[1]}": 17 * GIB, f"GPU-{UUIDS[0]}": MIB}).usable_bytes == 16 * GIB
    assert driver.card_at("0", {f"GPU-{UUIDS[0]}": 0}).usable_bytes == 0


def test_a_card_that_nvml_cannot_read_hides_no_other(libraries: dict[str, Any]) -> None:
    def first_is_lost(device: Any, reference: Any) -> int:
        return 15 if device.value == 1 else memory(device, reference)

    libraries["libnvidia-ml.so.1"] = SimpleNamespace(**{**vars(NVML), "nvmlDeviceGetMemoryInfo": first_is_lost})
    assert driver.free_bytes() == {f"GPU-{UUIDS[1]}": 3 * GIB}


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetAttribute"])
def test_a_driver_that_refuses_or_is_too_old_has_no_card(libraries: dict[str, Any], call: str) -> None:
    libraries["libcuda.so.1"] = SimpleNamespace(**{**vars(CUDA), call: lambda *arguments: 100})
    with pytest.raises(OSError, match="error 100"):
        driver.card_here()
    libraries["libcuda.so.1"] = without(CUDA, call)
    with pytest.raises(OSError, match=call):
        driver.card_here()


def test_without_its_libraries_nothing_is_known(libraries: dict[str, Any]) -> None:
    libraries.clear()
    assert (driver.free_bytes(), driver.count()) == ({}, 0)
    with pytest.raises(OSError, match=r"libcuda\.so"):
        driver.card_here()
    libraries["libnvidia-ml.so.1"] = without(NVML, "nvmlDeviceGetCount_v2")
    assert driver.free_bytes() == {}


def test_all_of_a_card_is_usable_where_nvml_is_missing(libraries: dict[str, Any]) -> None:
    del libraries["libnvidia-ml.so.1"]
    assert driver.card_here().usable_bytes == 16 * GIB
