"""The virtual GPU: an engine's own Python code runs without a GPU, and every device allocation is accounted for.

    with virtual_gpu(card) as device:
        ...  # torch.empty(8 << 30, dtype=torch.uint8, device="cuda") takes 8 GiB of it, and no memory

Shapes, dtypes, lifetimes and what is computed on small tensors are real; large tensors have no memory, and kernels
do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefill_probe.virtual.device import Card, Device


@contextlib.contextmanager
def virtual_gpu(card: Card) -> Iterator[Device]:
    """This process has the GPU ``card``, and nothing else runs on it, while the block runs.

    Raises:
        RuntimeError: the process has used a real GPU, or its torch cannot have a virtual one.
    """
    from prefill_probe.virtual import cuda, launches
    from prefill_probe.virtual.device import Device
    from prefill_probe.virtual.tensors import Tracing

    device = Device(card)
    with cuda.answered(device), launches.answered(card), Tracing(device):
        yield device
