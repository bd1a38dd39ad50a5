"""The virtual device: capacity, memory in both ledgers, streams, and the error that a GPU gives when it is full."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from prefill_probe.sizes import GIB, MIB
from prefill_probe.virtual.allocator import Allocator, Block, OutOfDeviceMemory

# What a process takes of the device outside of the allocator, by source and in order. Measured on one H200 (driver
# 580.159, torch 2.11, Triton 3.6) with a FreeToken 0.1.3 that was started with 15,873 MiB free, of which 15,279.5 were
# left with its context. The other two are what makes its KV pool (76,810 pages) and then its free memory after graph
# capture (517.6 MiB) come out as they did.
CONTEXT = ("CUDA context", int(593.56 * MIB))
FIRST_TENSOR = ("kernels of the first tensors", int(104.5 * MIB))
FIRST_PRODUCT = ("matrix library, kernels and graphs", int(67.8 * MIB))
# cuBLAS keeps a workspace for each stream that it is used on, from the caching allocator
# (``at::cuda::blas``, ``:4096:2:16:8`` and on compute capability 9.0 ``:4096:8``).
BLAS_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
BLAS_WORKSPACE_BYTES_SM90 = 8 * 4096 * 1024


@dataclass(frozen=True)
class Card:
    """What the driver says of a GPU.

    Attributes:
        total_bytes: of the device.
        usable_bytes: of it, free when nothing runs on it.
        multiprocessors: streaming multiprocessors; kernels size scratch memory by them.
        shared_bytes: shared memory of a block, opt-in.
        integrated: its memory is the host's.
    """

    name: str
    total_bytes: int
    usable_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int = 101_376
    integrated: bool = False


@dataclass
class Device:
    """One virtual GPU, used by this process alone.

    Attributes:
        outside: bytes outside of the allocator, by source.
    """

    card: Card
    outside: dict[str, int] = field(default_factory=lambda: dict([CONTEXT]))

    def __post_init__(self) -> None:
        self.allocator = Allocator(self._free_beside, self.card.total_bytes)
        self.stream = 0
        self._streams = 0
        self._workspaces: dict[int, Block] = {}

    def _free_beside(self, reserved: int) -> int:
        return self.card.usable_bytes - sum(self.outside.values()) - reserved

    @property
    def free_bytes(self) -> int:
        """Free on the device, as ``cudaMemGetInfo`` says."""
        return max(0, self.allocator.device_free)

    def make_room(self) -> None:
        """From now on there is more memory than anything takes: what a chunk needs is seen, whatever it has."""
        self.card = replace(self.card, usable_bytes=1 << 50)

    def new_stream(self) -> int:
        """The handle of a new stream; 0 is the default stream."""
        self._streams += 1
        return self._streams

    def allocate(self, size: int) -> Block:
        """A block for the current stream.

        Raises:
            torch.OutOfMemoryError: as a GPU would.
        """
        self.outside.setdefault(*FIRST_TENSOR)
        try:
            return self.allocator.allocate(size, self.stream)
        except OutOfDeviceMemory as full:
            import torch

            raise torch.OutOfMemoryError(self._full_text(full)) from None

    def need_blas_workspace(self) -> None:
        """Take the matrix library's workspace for the current stream, when it is first used there."""
        self.outside.setdefault(*FIRST_PRODUCT)
        if self.stream not in self._workspaces:
            large = self.card.capability[0] == 9
            size = BLAS_WORKSPACE_BYTES_SM90 if large else BLAS_WORKSPACE_BYTES
            self._workspaces[self.stream] = self.allocate(size)

    def _full_text(self, full: OutOfDeviceMemory) -> str:
        allocator = self.allocator
        used = allocator.reserved + sum(self.outside.values())
        others = self.card.total_bytes - self.card.usable_bytes
        other_text = f"Other use of the card takes {_size_text(others)}. " if others else ""
        graphs = allocator.graph_bytes()
        graph_text = f"with {_size_text(graphs)} allocated in private pools (e.g., CUDA Graphs), " if graphs else ""
        return (
            f"CUDA out of memory. Tried to allocate {_size_text(full.requested_bytes)}. "
            f"GPU 0 has a total capacity of {_size_text(self.card.total_bytes)} of which "
            f"{_size_text(max(0, full.free_bytes))} is free. {other_text}"
            f"Including non-PyTorch memory, this process has {_size_text(used)} memory in use. "
            f"Of the allocated memory {_size_text(allocator.allocated)} is allocated by PyTorch, {graph_text}and "
            f"{_size_text(allocator.reserved - allocator.allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        )


def _size_text(size: int) -> str:
    """``size`` as the allocator's own messages write it."""
    if size <= 1024:
        return f"{size} bytes"
    if size <= MIB:
        return f"{size / 1024:.2f} KiB"
    if size <= GIB:
        return f"{size / MIB:.2f} MiB"
    return f"{size / GIB:.2f} GiB"
