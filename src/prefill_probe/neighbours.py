"""Neighbours: other processes on the same GPU, by NVML where it is there.

Without NVML, or where the driver hides processes (WSL, some containers), the answer is that nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Neighbours:
    """Memory of other processes at one moment: pid -> bytes. ``known`` is False where nobody could say."""

    known: bool = False
    bytes_by_pid: Mapping[int, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """What they hold together."""
        return sum(self.bytes_by_pid.values())


@dataclass(frozen=True)
class Load:
    """What the GPU is doing, for the log of a hung probe; None where unknown."""

    utilisation_percent: int | None = None
    power_watts: float | None = None
    used_bytes: int | None = None


class Nvml:
    """NVML for one GPU, found by its UUID so that ``CUDA_VISIBLE_DEVICES`` does not matter."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            self._nvml = pynvml
        except Exception:
            # No binding, no library, no driver, or a GPU that NVML does not list: nothing is known, and no error.
            self._handle = None

    def neighbours(self) -> Neighbours:
        """Who else holds memory."""
        if self._handle is None:
            return Neighbours()
        try:
            processes = list(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
            processes += self._nvml.nvmlDeviceGetGraphicsRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return Neighbours()
        found = {process.pid: process.usedGpuMemory for process in processes}
        if os.getpid() not in found or any(size is None for size in found.values()):
            return Neighbours()  # pids of another namespace, or sizes that the driver hides
        return Neighbours(True, {pid: int(size) for pid, size in found.items() if pid != os.getpid()})

    def load(self) -> Load:
        """What the GPU is doing now."""
        if self._handle is None:
            return Load()

        def read(ask: Any) -> Any:
            try:
                return ask()
            except self._nvml.NVMLError:
                return None

        rates = read(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle))
        power = read(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle))
        memory = read(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle))
        return Load(
            None if rates is None else int(rates.gpu),
            None if power is None else power / 1000,
            None if memory is None else int(memory.used),
        )


def moved_bytes(before: Neighbours, after: Neighbours) -> int | None:
    """How much more (or less, negative) others hold; None where it is not known."""
    if not (before.known and after.known):
        return None
    return after.total_bytes - before.total_bytes
