"""What the real allocator says of itself, as the meter reads it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


def test_allocations_are_counted_as_the_history_has_them_and_graph_pools_are_told_apart() -> None:
    import torch

    from prefill_probe.meter import CudaMeter

    device = torch.device("cuda", 0)
    kept = torch.ones(1 << 20, device=device)
    meter = CudaMeter(device)
    before, graphs = meter.allocations(), meter.graph_bytes()
    with meter.trace() as events:
        for size in (1000, 3 << 20, 700):
            torch.empty(size, dtype=torch.uint8, device=device)
    made = [event for event in events if event["action"] == "alloc"]
    assert [event["size"] for event in made] == [1000, 3 << 20, 700]
    assert meter.allocations() - before == 3
    assert all(event["frames"][0]["filename"] for event in made)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ = kept * 2
    assert meter.graph_bytes() - graphs >= kept.nbytes
