"""The meter: the one owner of memory statistics.

Two ledgers are read, and neither is enough alone.

* **allocator**: what the caching allocator handed out (``allocated``) and what it took from the device to do so
  (``reserved``, which granularity and fragmentation make larger). Exact, and this process's own.
* **device**: free memory. Kernels' modules, handles and graphs are only here, but so are the neighbours.

Worked example, in MiB, of one warm chunk on a 16 GiB card:

    idle        reserved 13,900   device used 14,700   -> other than the allocator: 800
    peak        reserved 15,582
    afterwards  reserved 13,900   device used 14,712   -> other than the allocator: 812 (a module was loaded)

    transient   reserved 15,582 - 13,900 = 1,682
                device   1,682 + (812 - 800)  = 1,694

So the device transient is the allocator's reserved transient plus what grew outside of it: the peak between two
readings is known exactly, with no sampling, and a neighbour's own allocations show only in the second part.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prefill_probe.neighbours import Load, Neighbours, Nvml

# Of one chunk: a hundred allocations a layer, each with its frees, of the deepest models at hand, several times over.
_TRACE_EVENTS = 200_000
# The allocator's pool that is not private to anything.
_SHARED_POOL = (0, 0)


@dataclass(frozen=True)
class Reading:
    """Memory at one idle moment, in bytes.

    Attributes:
        allocated_bytes: handed out by the allocator.
        reserved_bytes: taken from the device by the allocator.
        free_bytes: free on the device.
        total_bytes: of the device.
    """

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int

    @property
    def other_bytes(self) -> int:
        """Used on the device, but not by this process's allocator: modules, handles, graphs, neighbours."""
        return self.total_bytes - self.free_bytes - self.reserved_bytes

    @property
    def headroom_bytes(self) -> int:
        """What the process can still obtain from the device.

        What the allocator holds unused when idle is not in it: after ``empty_cache`` that is the rest of pages that
        are in use and the private pools of captured graphs (measured: 90 MiB of 630), which no large block fits into.
        A transient is counted from the same idle moment, so what it can take from there is in neither.
        """
        return self.free_bytes


@dataclass(frozen=True)
class Peak:
    """A transient: peak minus idle, in bytes, in both ledgers."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


class Measured:
    """What ``Meter.measure`` fills in when its block ends, also when the block raised.

    Attributes:
        peak: the transient over the reading that the block began with.
        seconds: wall time of the block, the device's work included.
        free_bytes: free on the device at the end, which after an error is what it left.
    """

    peak: Peak = Peak(0, 0, 0)
    seconds: float = 0.0
    free_bytes: int = 0


class Meter(Protocol):
    """Memory as the probe sees it.

    Attributes:
        timed: whether the seconds that it measures are those of the device.
    """

    timed: bool

    def read(self) -> Reading:
        """Let the device finish, hand unused memory back to it, and read both ledgers."""

    def reread(self, start: Reading) -> Reading:
        """``start``, an earlier reading, with what has changed since outside the allocator; nothing is handed back.

        A chunk measured against it counts what earlier ones left in the allocator's cache, as it does for requests.
        """

    def boot_peak(self) -> Peak:
        """The allocator's highest totals while the engine started (device: 0, not known)."""

    def neighbours(self) -> Neighbours:
        """Other processes' memory on the device."""

    def load(self) -> Load:
        """What the device is doing now; callable from any thread, also while a kernel hangs."""

    def measure(self, idle: Reading) -> AbstractContextManager[Measured]:
        """Context manager around one chunk; yields a ``Measured``. ``idle`` is the last ``read``."""

    def trace(self) -> AbstractContextManager[list[dict[str, Any]]]:
        """Context manager around one chunk; its list holds the allocator's events once the block has ended.

        Empty where the allocator keeps no history.
        """

    def allocations(self) -> int:
        """How many blocks the allocator has handed out so far: a position in what ``trace`` notes."""

    def graph_bytes(self) -> int:
        """What the private pools of captured graphs have taken from the device."""

    def unused(self) -> int:
        """Bytes that the allocator holds and has not handed out; asks the driver for nothing."""

    def obtainable(self) -> tuple[int, int]:
        """Bytes that are free on the device, and ``unused``; waits for nothing."""

    def release(self) -> None:
        """Give what the allocator holds unused back to the device."""

    def forget_peaks(self) -> None:
        """Reset the peak statistics, so that the probe's own peak is not taken for the engine's."""


class CudaMeter:
    """The meter of one CUDA device of this process (``torch.cuda``; source: the caching allocator's statistics)."""

    def __init__(self, device: Any, noted: list[Peak] | None = None) -> None:
        """``noted``: of ``kept_peaks`` around the engine's start."""
        import torch

        self.timed = True
        self._cuda = torch.cuda
        self._noted = noted or []
        self._device = device
        self._nvml = Nvml(str(getattr(torch.cuda.get_device_properties(device), "uuid", "")))

    def read(self) -> Reading:
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        free, total = self._cuda.mem_get_info(self._device)
        return Reading(self._cuda.memory_allocated(self._device), self._cuda.memory_reserved(self._device), free, total)

    def reread(self, start: Reading) -> Reading:
        self._cuda.synchronize(self._device)
        free, total = self._cuda.mem_get_info(self._device)
        other = total - free - self._cuda.memory_reserved(self._device)
        return replace(start, free_bytes=start.free_bytes - (other - start.other_bytes))

    def boot_peak(self) -> Peak:
        peaks = [*self._noted, self._highest()]
        return Peak(max(each.allocated_bytes for each in peaks), max(each.reserved_bytes for each in peaks), 0)

    def _highest(self) -> Peak:
        return Peak(self._cuda.max_memory_allocated(self._device), self._cuda.max_memory_reserved(self._device), 0)

    def neighbours(self) -> Neighbours:
        return self._nvml.neighbours()

    def load(self) -> Load:
        return self._nvml.load()

    @contextmanager
    def measure(self, idle: Reading) -> Iterator[Measured]:
        measured = Measured()
        self._cuda.reset_peak_memory_stats(self._device)
        started = time.monotonic()
        try:
            yield measured
            self._cuda.synchronize(self._device)
        finally:
            measured.seconds = time.monotonic() - started
            highest = self._highest()
            free, total = self._cuda.mem_get_info(self._device)
            measured.free_bytes = free
            other = total - free - self._cuda.memory_reserved(self._device)
            reserved = highest.reserved_bytes - idle.reserved_bytes
            measured.peak = Peak(
                highest.allocated_bytes - idle.allocated_bytes,
                reserved,
                reserved + max(0, other - idle.other_bytes),
            )

    @contextmanager
    def trace(self) -> Iterator[list[dict[str, Any]]]:
        """By the allocator's memory history (torch.cuda.memory), with Python stacks; it is off again afterwards."""
        memory = self._cuda.memory
        events: list[dict[str, Any]] = []
        # The history explains a peak and decides nothing: a torch without it, or a dead context, costs that alone.
        with contextlib.suppress(Exception):
            memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=_TRACE_EVENTS)
        try:
            yield events
        finally:
            with contextlib.suppress(Exception):
                events += memory._snapshot()["device_traces"][self._device.index or 0]
                memory._record_memory_history(enabled=None)

    def allocations(self) -> int:
        return int(self._cuda.memory_stats(self._device).get("allocation.all.allocated", 0))

    def graph_bytes(self) -> int:
        segments = self._cuda.memory_snapshot()
        private = [each for each in segments if tuple(each.get("segment_pool_id", _SHARED_POOL)) != _SHARED_POOL]
        return sum(int(each["total_size"]) for each in private if each.get("device", 0) == (self._device.index or 0))

    def unused(self) -> int:
        # Asked before every prefill: ``memory_reserved`` and ``memory_allocated`` each write out all statistics.
        stats = self._cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"])

    def obtainable(self) -> tuple[int, int]:
        free, _ = self._cuda.mem_get_info(self._device)
        return free, self.unused()

    def release(self) -> None:
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()

    def forget_peaks(self) -> None:
        self._cuda.reset_peak_memory_stats(self._device)


@contextmanager
def kept_peaks() -> Iterator[list[Peak]]:
    """While the block runs, note the allocator's highest totals whenever somebody resets them (device: 0).

    An engine that resets its peak statistics on the way, around graph capture for one, loses what it peaked at before.
    """
    import torch

    noted: list[Peak] = []
    original = torch.cuda.reset_peak_memory_stats

    def reset(device: Any = None) -> None:
        noted.append(Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), 0))
        original(device)

    torch.cuda.reset_peak_memory_stats = reset
    try:
        yield noted
    finally:
        torch.cuda.reset_peak_memory_stats = original
