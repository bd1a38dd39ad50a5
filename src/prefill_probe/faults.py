"""Faults: what an error really is, and the named errors that end a start.

``classify`` is a list of small rules, first match wins. The signatures come from public reports; an error that no rule
knows is ``unknown`` and is never called a memory shortage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prefill_probe.sizes import MIB, parse_size

EX_OK, EX_USAGE, EX_UNAVAILABLE, EX_SOFTWARE, EX_TEMPFAIL, EX_CONFIG = 0, 2, 69, 70, 75, 78


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


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """``error`` and the errors behind it, the last raised first."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def exit_status_of(text: str) -> int | None:
    """The exit status for an error text of the form ``TypeName: ...``; None if it is not one of this package's."""
    name = text.partition(":")[0].strip()
    return next((error.exit_status for error in ERRORS if error.__name__ == name), None)


@dataclass(frozen=True)
class Fault:
    """What an error is.

    Attributes:
        kind: ``memory``, ``memory-likely``, ``memory-outside-allocator``, ``host-memory``, ``launch-limit``,
            ``architecture``, ``kernel-fault``, ``device-lost``, ``driver``, ``time-out``, ``planner``,
            ``token-pool`` or ``unknown``.
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
        return self.kind in ("memory", "memory-likely", "memory-outside-allocator")


@dataclass(frozen=True)
class _Scene:
    """What is known besides the error's text."""

    stage: str
    free_bytes: int
    total_bytes: int
    wsl: bool

    @property
    def nearly_full(self) -> bool:
        """Less than 2 % of the device (at least 256 MiB) is free."""
        return self.total_bytes > 0 and self.free_bytes < max(self.total_bytes // 50, 256 * MIB)


@dataclass(frozen=True)
class _Rule:
    """If ``pattern`` is in the text and ``applies``, the error is of this kind."""

    kind: str
    pattern: re.Pattern[str]
    retryable: bool = False
    chunk_helps: bool = False
    ratio_helps: bool = False
    note: str = ""
    applies: Callable[[_Scene], bool] = lambda scene: True


def _rule(kind: str, pattern: str, **more: Any) -> _Rule:
    return _Rule(kind, re.compile(pattern, re.IGNORECASE), **more)


_XID = r"Xid(?: *\(PCI[^)]*\))?:? *"
_MEMORY = {"retryable": True, "chunk_helps": True, "ratio_helps": True}
_LIBRARY_ALLOC = r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|NCCL.*unhandled cuda error"

# Host memory, the engine's own pools and shared memory come first: their texts also speak of memory running out.
_RULES: tuple[_Rule, ...] = (
    _rule("host-memory", r"cudaHostRegister|PinFailed|\bpinned? memory\b.*(fail|out of)", note="host memory, not VRAM"),
    _rule("host-memory", r"DefaultCPUAllocator|Cannot allocate memory|\bENOMEM\b|\bMemoryError\b|\bbad_alloc\b"),
    _rule("host-memory", r"(killed by )?signal 9\b|\bSIGKILL\b|\bKilled\b$|exit ?code -9\b|oom-kill"),
    _rule(
        "token-pool", r"Prefill out of memory|(swa|state|kv|LinearState)\w* ?pool exhausted|did not free enough space"
    ),
    _rule("planner", r"cache budget too small|not enough memory for KV cache|moe_cache_size=\d+ is too small"),
    _rule("planner", r"slot cap \d+ below|CacheRebuildRejected"),
    _rule("architecture", r"out of resources?: *(shared memory|tensor memory|registers)|OutOfResources"),
    _rule("architecture", r"no kernel image|Rowwise scaling is not currently supported|requires compute capability"),
    _rule("device-lost", rf"\bdevice (is )?lost\b|{_XID}79\b|fallen off the bus|cudaErrorDevicesUnavailable"),
    _rule("kernel-fault", r"illegal (memory access|address|instruction)|misaligned address|launch failure"),
    _rule("kernel-fault", rf"device-side assert|{_XID}(13|31)\b|cudaErrorIllegalAddress|cudaErrorLaunchFailure"),
    _rule(
        "launch-limit",
        r"(CUDA|Triton|launch|kernel|cu[A-Z]).*invalid (argument|configuration)|cudaErrorInvalid(Value|Configuration)",
        retryable=True,
        chunk_helps=True,
        note="a grid limit (tokens x experts per token)",
    ),
    _rule(
        "memory",
        r"CUDA out of memory|\[CUDA\]: out of memory|CUDA (driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|cuda runtime error \(2\)",
        **_MEMORY,
    ),
    _rule("memory-outside-allocator", _LIBRARY_ALLOC, **_MEMORY, applies=lambda scene: scene.nearly_full),
    _rule("driver", _LIBRARY_ALLOC, note="a library could not allocate although memory is free"),
    _rule(
        "memory-likely",
        r"device not ready|cudaErrorNotReady",
        **_MEMORY,
        note="on WSL with the GPU nearly full this stands for running out of memory",
        applies=lambda scene: scene.wsl and scene.nearly_full and scene.stage != "load",
    ),
    _rule("driver", r"device not ready|cudaErrorNotReady|CUDA driver error|cudaErrorInitializationError"),
    _rule("time-out", r"the launch timed out|cudaErrorLaunchTimeout|PrefillTimeoutError|watchdog.*time-?out"),
)

_TRIED = re.compile(r"Tried to allocate ([\d.]+ ?\w+)")
_FREE = re.compile(r"of which ([\d.]+ ?\w+) is free")
_LONGEST_LINE = 300


def _size_in(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    try:
        return parse_size(match[1]) if match else None
    except ValueError:
        return None


def classify(
    error: BaseException | str, *, stage: str = "prefill", free_bytes: int = 0, total_bytes: int = 0, wsl: bool = False
) -> Fault:
    """What ``error`` is, for an exception or for the text of a log.

    The last exception of a chain is judged; ``EngineDeadError``, ``KeyError`` or "Backend worker is gone" are masks
    over another error and say nothing by themselves.

    Args:
        error: an exception, or text.
        stage: what was going on: ``"prefill"`` or ``"load"``.
        free_bytes: free on the device right after the error.
        total_bytes: of the device; 0 if unknown, and then nothing is concluded from how full it is.
        wsl: whether the system is WSL2.
    """
    if isinstance(error, BaseException):
        name, message = type(error).__name__, str(error)
        line = f"{name}: {message}"
        # An OutOfMemoryError of torch is what its type says, whatever its text; on the CPU torch raises RuntimeError.
        text = f"CUDA out of memory: {message}" if name == "OutOfMemoryError" else line
    else:
        text = line = error
    line = next((part.strip() for part in line.splitlines() if part.strip()), "no message")[:_LONGEST_LINE]
    scene = _Scene(stage, free_bytes, total_bytes, wsl)
    for rule in _RULES:
        if rule.pattern.search(text) and rule.applies(scene):
            said = f"{line} ({rule.note})" if rule.note else line
            sizes = _size_in(_TRIED, text), _size_in(_FREE, text)
            return Fault(rule.kind, rule.retryable, rule.chunk_helps, rule.ratio_helps, said, *sizes)
    return Fault("unknown", False, False, False, line)
