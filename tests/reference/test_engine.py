"""The whole probe on the reference engine, on virtual GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from warm import document

from prefill_probe.sizes import GIB

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("fla")
    return document(HERE / "on_virtual_gpu.py")


def test_it_needs_no_engine(found: dict[str, Any]) -> None:
    assert found["freetoken"] is False


def test_every_shape_runs_and_leaves_no_trace(found: dict[str, Any]) -> None:
    every = found["every shape"]
    assert every["verdict"] == "fits"
    assert every["runs"]["full chunk"] == every["runs"]["first chunk"] == [1, 1024, 0]
    assert every["runs"]["packed chunk"] == [4, 1024, 0]
    assert every["runs"]["chunk after a prefix hit"] == [1, 1024, 1024]
    # The longest prompt of the geometry, less one chunk.
    assert every["runs"]["deepest chunk"][2] > 260_000
    assert not any("not run" in note for note in every["notes"])
    assert every["changed"] == []


def test_what_no_scheduler_would_issue_is_refused(found: dict[str, Any]) -> None:
    assert found["every shape"]["refused"] == ["too many", "too long", "no room"]


@pytest.mark.parametrize("word", ["deep", "packed"])
def test_an_oom_anywhere_is_named_and_leaves_no_trace(found: dict[str, Any], word: str) -> None:
    failures = found["every shape"]["failures"][word]
    assert failures["failed"] >= 10
    assert {"gdn", "moe", "attention"} <= set(failures["named"])
    assert failures["changed"] == []


def test_a_chunk_that_does_not_fit_fails_as_on_a_gpu_and_what_fits_was_run(found: dict[str, Any]) -> None:
    record = found["incident"]["record"]
    assert record["verdict"] == "does-not-fit"
    assert record["engine"]["name"] == "reference"
    assert record["fault"]["text"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate")
    ran = {tuple(line["flags"]): line for line in record["advice"] if line["was_run"]}
    assert {("--max-prefill-length",), ("--memory-ratio",)} <= set(ran)
    assert all(line["leaves_bytes"] >= record["memory"]["margin_bytes"] for line in ran.values())
    assert ran["--max-prefill-length",]["flags"]["--max-prefill-length"] < 8192
    assert ran["--memory-ratio",]["flags"]["--memory-ratio"] < 0.95
    failed = [run for run in record["shapes"] if run["oom"]]
    assert all(run["oom"]["site"].split()[0] in ("gdn", "moe", "attention") for run in failed)


def test_the_pools_are_as_before_after_advice_was_run(found: dict[str, Any]) -> None:
    assert found["incident"]["changed"] == []


def test_the_pool_takes_what_the_ratio_leaves(found: dict[str, Any]) -> None:
    """0.05 of what was free before load, in keys and values of one layer: 2 KV heads of 256 in bf16."""
    high, low, size = found["incident"]["pool"]
    page = found["incident"]["page_tokens"]
    token_bytes = 2 * 2 * 256 * 2
    assert size == (high + page) * token_bytes
    free = found["incident"]["record"]["memory"]["free_before_load_bytes"]
    assert (high - low) * token_bytes == pytest.approx(0.05 * free, abs=2 * page * token_bytes)
    assert 14 * GIB < free < 15.5 * GIB


def test_what_is_held_when_idle_is_named(found: dict[str, Any]) -> None:
    held = found["incident"]["record"]["memory"]["held"]
    assert held["kv_pool_bytes"] == found["incident"]["pool"][2]
    # Four requests, a snapshot of each, and the slot that nobody gets; three layers.
    assert held["state_pool_bytes"] == 9 * 3 * (48 * 128 * 128 * 4 + (16 + 16 + 48) * 128 * 4 * 2)
    experts, vocabulary = 512 * 3 * 640 * 2560 * 2, 2 * 248320 * 2560 * 2
    assert 1.0 < held["weights_bytes"] / (experts + vocabulary) < 1.1


def test_a_watched_chunk_is_told_by_component_and_layer(found: dict[str, Any]) -> None:
    watched = [run for run in found["incident"]["record"]["shapes"] if run["made_of"]]
    assert {"gdn", "norm", "embedding"} <= set(watched[-1]["made_of"]["components"])
    assert {0, 1, 2, 3} <= set(found["every shape"]["layers"][-1])


def test_a_ratio_that_leaves_no_pool_is_refused(found: dict[str, Any]) -> None:
    assert "--memory-ratio is 0.20" in found["incident"]["refusal"]


def test_adapt_lowers_the_chunk_and_the_next_start_confirms_it(found: dict[str, Any]) -> None:
    (first, budget, _, many), (again, budget_again, _, few) = found["adapt"]
    assert first["flags"] == again["flags"] == {"--max-prefill-length": budget}
    assert budget == budget_again < 8192
    assert again["confirmed_from_an_earlier_start"]
    assert few == 1 < many


def test_adapt_kv_shrinks_the_pool_and_keeps_the_chunk(found: dict[str, Any]) -> None:
    (first, budget, pages, _), (again, _, pages_again, _) = found["adapt-kv"]
    assert set(first["flags"]) == {"--memory-ratio"}
    assert budget == 8192
    assert pages == pages_again < found["incident"]["pool"][0] // found["incident"]["page_tokens"]
    assert again["confirmed_from_an_earlier_start"]
