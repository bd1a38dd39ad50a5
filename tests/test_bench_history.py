"""``scripts/history.py``: what it says of an engine whose watched runs are slower, or need more, by a known share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_engine import MIB, MemoryEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from history import paired

from prefill_probe.shape import Shape, full_chunk


def engine_with(seconds: Callable[[bool, int], float], extra: Callable[[bool], int] = lambda watched: 0) -> Any:
    """An engine whose run takes ``seconds(watched, number)`` and ``extra(watched)`` bytes more."""
    state = {"traces": 0}

    def before_run(number: int, shape: Shape) -> None:
        watched, state["traces"] = engine.traces > state["traces"], engine.traces
        engine.seconds = seconds(watched, number)
        engine.extra = lambda shape: extra(watched)

    engine = MemoryEngine(4096 * MIB, before_run=before_run)
    return engine


def test_the_overhead_is_that_of_neighbouring_runs_also_while_the_machine_gets_slower() -> None:
    engine = engine_with(lambda watched, number: (1.04 if watched else 1.0) * 1.001**number)
    result = paired(engine, full_chunk(engine.limits()), turns=9)
    assert result["turns"] == 9
    assert result["overhead"]["history"] == pytest.approx(0.04, abs=0.005)
    assert result["ok"]


def test_more_than_five_percent_is_not_accepted() -> None:
    engine = engine_with(lambda watched, number: 1.08 if watched else 1.0)
    result = paired(engine, full_chunk(engine.limits()), turns=3)
    assert result["overhead"] == {"history": 0.08, "watched": 0.08}
    assert result["seconds"] == {"plain": 1.0, "history": 1.08, "watched": 1.08}
    assert not result["ok"]


def test_a_history_that_is_in_the_peak_is_not_accepted() -> None:
    engine = engine_with(lambda watched, number: 1.0, lambda watched: MIB if watched else 0)
    result = paired(engine, full_chunk(engine.limits()), turns=3)
    assert result["allocated_bytes"]["history"] == result["allocated_bytes"]["plain"] + MIB
    assert not result["ok"]
