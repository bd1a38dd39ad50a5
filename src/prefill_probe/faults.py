"""Faults: what an error really is, and the named errors that end a start.

``classify`` is a list of small rules, first match wins. The signatures come from public reports; an error that no rule
knows is ``unknown`` and is never called a memory shortage.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from prefill_probe.sizes import parse_size

EX_OK, EX_UNAVAILABLE, EX_SOFTWARE, EX_TEMPFAIL, EX_CONFIG = 0, 69, 70, 75, 78


class PrefillProbeError(RuntimeError):
    """The probe stops the start. ``exit_status`` is the process's (sysexits.h)."""

    exit_status = EX_SOFTWARE


class PrefillOOMError(PrefillProbeError):
    """A full prefill chunk does not fit the GPU; the configuration must change."""

    exit_status = EX_CONFIG


class PrefillFaultError(PrefillProbeError):
    """The chunk failed for another reason than memory."""


class PrefillTimeoutError(PrefillProbeError):
    """The chunk did not come back in time."""


class PrefillInconclusiveError(PrefillProbeError):
    """The measurement was disturbed; try again."""

    exit_status = EX_TEMPFAIL


ERRORS = (PrefillOOMError, PrefillFaultError, PrefillTimeoutError, PrefillInconclusiveError)


def exit_status_of(text: str) -> int | None:
    """The exit status for an error text of the form ``TypeName: ...``; None if it is not one of this package's."""
    name = text.partition(":")[0].strip()
    return next((error.exit_status for error in ERRORS if error.__name__ == name), None)


@dataclass(frozen=True)
class Fault:
    """What an error is.

    Attributes:
        kind: ``memory``, ``memory-outside-allocator``, ``host-memory``, ``launch-limit``, ``architecture``,
            ``kernel-fault``, ``device-lost``, ``driver``, ``planner``, ``token-pool`` or ``unknown``.
        retryable: whether another chunk can be run in this process.
        chunk_helps: whether a smaller chunk avoids it.
        ratio_helps: whether a lower memory ratio avoids it.
        text: one line for the user.
        requested_bytes: of the allocation that failed, where the error says so.
        free_bytes: on the device at that moment, where the error says so.
    """

    kind: str
    retryable: bool
    chunk_helps: bool
    ratio_helps: bool
    text: str
    requested_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def is_memory(self) -> bool:
        """Whether it is a shortage of GPU memory."""
        return self.kind in ("memory", "memory-outside-allocator")


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    kind: str
    retryable: bool
    chunk_helps: bool
    ratio_helps: bool
    applies: Callable[[int, int], bool] = lambda free, total: True


def _nearly_full(free: int, total: int) -> bool:
    return total > 0 and free < max(total // 50, 256 << 20)


def _rule(
    pattern: str,
    kind: str,
    *,
    retryable: bool = False,
    chunk_helps: bool = False,
    ratio_helps: bool = False,
    applies: Callable[[int, int], bool] = lambda free, total: True,
) -> _Rule:
    return _Rule(re.compile(pattern, re.IGNORECASE), kind, retryable, chunk_helps, ratio_helps, applies)


_RULES: tuple[_Rule, ...] = (
    _rule(r"cudaHostRegister|PinFailed|DefaultCPUAllocator|Cannot allocate memory|\bENOMEM\b|\bMemoryError\b", "host-memory"),
    _rule(r"Prefill out of memory|pool exhausted", "token-pool"),
    _rule(r"cache budget too small|Not enough memory for KV cache|moe_cache_size=\d+ is too small", "planner"),
    _rule(r"out of resource: shared memory|OutOfResources.*shared memory", "architecture"),
    _rule(r"no kernel image|Rowwise scaling is not currently supported", "architecture"),
    _rule(r"device lost|Xid 79|fallen off the bus", "device-lost"),
    _rule(r"illegal memory access|misaligned address|launch failure|device-side assert|Xid 31", "kernel-fault"),
    _rule(r"invalid configuration|invalid argument", "launch-limit", retryable=True, chunk_helps=True),
    _rule(
        r"CUDA out of memory|\[CUDA\]: out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation",
        "memory",
        retryable=True,
        chunk_helps=True,
        ratio_helps=True,
    ),
    _rule(
        r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|NCCL.*unhandled cuda error",
        "memory-outside-allocator",
        retryable=True,
        chunk_helps=True,
        ratio_helps=True,
        applies=_nearly_full,
    ),
    _rule(r"device not ready|CUDA driver error", "driver"),
)

_TRIED = re.compile(r"Tried to allocate ([\d.]+ ?\w+)")
_FREE = re.compile(r"of which ([\d.]+ ?\w+) is free")


def _size_in(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    try:
        return parse_size(match[1]) if match else None
    except ValueError:
        return None


def classify(
    error: BaseException | str, *, stage: str = "prefill", free_bytes: int = 0, total_bytes: int = 0, wsl: bool = False
) -> Fault:
    """What ``error`` is, for an exception or for a line of a log.

    Args:
        error: an exception, or text.
        stage: what was going on, in words (``"prefill"``, ``"load"``).
        free_bytes: free on the device right after the error.
        total_bytes: of the device.
        wsl: whether the system is WSL2.
    """
    if isinstance(error, BaseException):
        name, message = type(error).__name__, str(error)
        text = f"{name}: {message}"
        # torch.OutOfMemoryError is what it says, whatever its text.
        if name == "OutOfMemoryError" and "DefaultCPUAllocator" not in message:
            text = f"CUDA out of memory. {text}"
    else:
        text = error
    line = text.strip().splitlines()[0][:300] if text.strip() else "no message"
    for rule in _RULES:
        if rule.pattern.search(text) and rule.applies(free_bytes, total_bytes):
            return Fault(
                rule.kind,
                rule.retryable,
                rule.chunk_helps,
                rule.ratio_helps,
                line,
                _size_in(_TRIED, text),
                _size_in(_FREE, text),
            )
    return Fault("unknown", False, False, False, line)
