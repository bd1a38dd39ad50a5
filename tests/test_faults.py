"""The classifier: the table of published failures, paraphrases, and near misses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_probe import Fault, classify
from prefill_probe.faults import ERRORS, exit_status_of

GIB = 1 << 30
TORCH = (
    "CUDA out of memory. Tried to allocate 160.00 MiB. GPU 0 has a total capacity of 15.46 GiB of which 43.56 MiB is "
    "free. Including non-PyTorch memory, this process has 15.41 GiB memory in use."
)
FULL = {"free_bytes": 40 << 20, "total_bytes": 16 * GIB}
ROOMY = {"free_bytes": 4 * GIB, "total_bytes": 16 * GIB}


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class InternalError(RuntimeError):
    """Named like TVM's."""


class OutOfResources(Exception):
    """Named like Triton's."""


class PinFailed(RuntimeError):
    """Named like the engine's."""


CASES: list[tuple[BaseException | str, dict[str, object], str]] = [
    (OutOfMemoryError(TORCH), {}, "memory"),
    (OutOfMemoryError("Allocation on device"), {}, "memory"),
    (InternalError(f"Check failed: {TORCH}"), {}, "memory"),
    (RuntimeError("torch::stable: CUDA out of memory. Tried to allocate 1.50 GiB"), {}, "memory"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), {}, "memory"),
    (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), {}, "memory"),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), {}, "memory"),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        FULL,
        "memory-outside-allocator",
    ),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), ROOMY, "driver"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), FULL, "memory-outside-allocator"),
    (RuntimeError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO)"), FULL, "memory-outside-allocator"),
    (RuntimeError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO)"), ROOMY, "driver"),
    (RuntimeError("CUDA driver error: device not ready"), {**FULL, "wsl": True}, "memory-likely"),
    (RuntimeError("CUDA driver error: device not ready"), {**ROOMY, "wsl": True}, "driver"),
    (RuntimeError("CUDA driver error: device not ready"), FULL, "driver"),
    (RuntimeError("CUDA driver error: device not ready"), {**FULL, "wsl": True, "stage": "load"}, "driver"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), FULL, "kernel-fault"),
    (RuntimeError("CUDA error: unspecified launch failure"), ROOMY, "kernel-fault"),
    ("NVRM: Xid (PCI:0000:01:00): 31, pid=1, MMU Fault", {}, "kernel-fault"),
    ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", {}, "device-lost"),
    ("NVRM: Xid 79", {}, "device-lost"),
    ("CUDA error: device lost", {}, "device-lost"),
    (RuntimeError("CUDA error: invalid argument"), ROOMY, "launch-limit"),
    (RuntimeError("Triton Error [CUDA]: invalid configuration argument"), {}, "launch-limit"),
    (OutOfResources("out of resource: shared memory, Required: 233984, Hardware limit: 101376."), {}, "architecture"),
    (RuntimeError("CUDA error: no kernel image is available for execution on the device"), {}, "architecture"),
    (RuntimeError("Rowwise scaling is not currently supported on your device"), {}, "architecture"),
    (RuntimeError("cudaHostRegister failed: out of memory"), FULL, "host-memory"),
    (PinFailed("could not pin 1.4 GiB"), {}, "host-memory"),
    (OSError(12, "Cannot allocate memory"), {}, "host-memory"),
    (MemoryError(), {}, "host-memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), {}, "host-memory"),
    ("worker was killed by signal 9", {}, "host-memory"),
    (AssertionError("cache budget too small: minimum plan (moe=512 slots) needs 3 B > budget 2 B"), {}, "planner"),
    (AssertionError("Not enough memory for KV cache, try reducing --num-pages"), {}, "planner"),
    (ValueError("moe_cache_size=10 is too small: need at least num_experts=512 slots"), {}, "planner"),
    (RuntimeError("Prefill out of memory. Try to lower your batch size"), FULL, "token-pool"),
    (RuntimeError("SWA pool exhausted: need 8192, have 10"), FULL, "token-pool"),
    (RuntimeError("CUDA error: the launch timed out and was terminated"), {}, "time-out"),
    # Masks and strangers: nothing is concluded from them.
    (KeyError("model.layers.3"), FULL, "unknown"),
    ("EngineDeadError: the engine core died", FULL, "unknown"),
    ("Backend worker is gone and cannot be restarted; stopping the API server", FULL, "unknown"),
    (RuntimeError("the argument is invalid"), FULL, "unknown"),
    (RuntimeError("we ran out of memory lanes"), FULL, "unknown"),
    (RuntimeError(""), FULL, "unknown"),
    ("", {}, "unknown"),
]


@pytest.mark.parametrize(("error", "scene", "kind"), CASES, ids=lambda value: repr(value)[:50])
def test_every_known_signature_is_what_it_really_is(
    error: BaseException | str, scene: dict[str, object], kind: str
) -> None:
    assert classify(error, **scene).kind == kind  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "scene", "kind"), CASES, ids=lambda value: repr(value)[:50])
def test_a_log_line_is_judged_as_its_exception_is(
    error: BaseException | str, scene: dict[str, object], kind: str
) -> None:
    if isinstance(error, BaseException) and type(error) is not MemoryError and "Allocation on device" not in str(error):
        name = "torch.OutOfMemoryError" if isinstance(error, OutOfMemoryError) else type(error).__name__
        assert classify(f"{name}: {error}", **scene).kind == kind  # type: ignore[arg-type]


def test_sizes_are_read_from_the_message() -> None:
    fault = classify(OutOfMemoryError(TORCH))
    assert fault.requested_bytes == 160 << 20
    assert fault.free_bytes == int(43.56 * (1 << 20))


def test_what_helps_follows_from_what_it_is() -> None:
    def helps(error: BaseException | str, **scene: object) -> tuple[bool, bool, bool]:
        fault = classify(error, **scene)  # type: ignore[arg-type]
        return fault.retryable, fault.chunk_helps, fault.ratio_helps

    assert helps(OutOfMemoryError(TORCH)) == (True, True, True)
    assert helps(RuntimeError("CUDA error: invalid argument")) == (True, True, False)
    assert helps(RuntimeError("CUDA error: an illegal memory access was encountered")) == (False, False, False)
    assert helps("Xid 79") == (False, False, False)


def test_only_gpu_memory_counts_as_memory() -> None:
    kinds = {classify(error, **scene).kind: classify(error, **scene).is_memory for error, scene, _ in CASES}  # type: ignore[arg-type]
    assert {kind for kind, memory in kinds.items() if memory} == {"memory", "memory-likely", "memory-outside-allocator"}


def test_nothing_is_concluded_from_how_full_an_unknown_device_is() -> None:
    error = RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
    assert classify(error, free_bytes=0, total_bytes=0).kind == "driver"


@given(st.text(), st.text(max_size=20), st.integers(0, 1 << 45), st.integers(0, 1 << 45), st.booleans())
def test_any_text_is_classified_without_an_error(text: str, stage: str, free: int, total: int, wsl: bool) -> None:
    for error in (text, RuntimeError(text)):
        fault = classify(error, stage=stage, free_bytes=free, total_bytes=total, wsl=wsl)
        assert isinstance(fault, Fault)
        assert "\n" not in fault.text


def test_the_exit_status_is_read_from_the_error_s_name() -> None:
    assert {error.__name__: exit_status_of(f"{error.__name__}: text") for error in ERRORS} == {
        "PrefillOOMError": 78,
        "PrefillFaultError": 70,
        "PrefillTimeoutError": 70,
        "PrefillInconclusiveError": 75,
    }
    assert exit_status_of("backend worker freetoken-TP0-scheduler exited during load") is None
    assert exit_status_of("") is None
