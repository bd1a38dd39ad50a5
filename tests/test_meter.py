"""The meter's parts that need no device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_peaks_are_noted_before_somebody_resets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefill_probe.meter import kept_peaks

    now = {"allocated": 100, "reserved": 200}
    resets: list[object] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: now["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: now["reserved"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    original = torch.cuda.reset_peak_memory_stats
    with kept_peaks() as noted:
        torch.cuda.reset_peak_memory_stats("cuda:0")
        now["allocated"] = 50
        torch.cuda.reset_peak_memory_stats("cuda:0")
    assert [peak.allocated_bytes for peak in noted] == [100, 50]
    assert [peak.reserved_bytes for peak in noted] == [200, 200]
    assert resets == ["cuda:0", "cuda:0"]
    assert torch.cuda.reset_peak_memory_stats is original


def test_an_allocator_without_a_history_gives_none_and_is_no_error() -> None:
    from types import SimpleNamespace

    from prefill_probe.meter import CudaMeter

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no history")

    meter = CudaMeter.__new__(CudaMeter)
    meter._cuda = SimpleNamespace(memory=SimpleNamespace(_record_memory_history=refuse, _snapshot=refuse))
    meter._device = torch.device("cuda", 0)
    with meter.trace() as events:
        pass
    assert events == []
    with pytest.raises(ValueError, match="the chunk's own"), meter.trace():
        raise ValueError("the chunk's own")


def test_what_captured_graphs_hold_is_told_apart_by_their_private_pools() -> None:
    from types import SimpleNamespace

    from prefill_probe.meter import CudaMeter

    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 1000},
        {"device": 0, "segment_pool_id": (0, 7), "total_size": 20},
        {"device": 0, "segment_pool_id": (0, 7), "total_size": 3},
        {"device": 1, "segment_pool_id": (0, 7), "total_size": 500},
        {"device": 0, "total_size": 4000},  # of a torch that does not say
    ]
    meter = CudaMeter.__new__(CudaMeter)
    meter._cuda = SimpleNamespace(
        memory_snapshot=lambda: segments, memory_stats=lambda device: {"allocation.all.allocated": 42}
    )
    meter._device = torch.device("cuda", 0)
    assert meter.graph_bytes() == 23
    assert meter.allocations() == 42
