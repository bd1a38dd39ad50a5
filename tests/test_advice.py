from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prefill_probe import Budget, Point, Pool, recommend
from prefill_probe.advice import need_at

MIB = 1 << 20
GIB = 1 << 30
CASES = Path(__file__).parent / "cases"
AUTOMATIC = Budget(0.95, 15 * GIB, True, True)


def values(points: list[Point], headroom: int, **more: object) -> dict[str, float]:
    arguments = {"chunk": 8192, "margin_bytes": 128 * MIB, "budget": AUTOMATIC} | more
    found = recommend(points, headroom_bytes=headroom, **arguments)  # type: ignore[arg-type]
    return {flag: value for candidate in found for flag, value in candidate.flags.items()}


def test_the_published_incident_gets_a_chunk_and_a_ratio_that_are_known_to_work() -> None:
    case = json.loads((CASES / "flash-next-5080-8192.json").read_text())
    points = [Point(int(tokens), size) for tokens, size in case["transients"].items()]
    budget = Budget(case["flags"]["--memory-ratio"], case["free_before_load_bytes"], True, True)
    found = values(points, case["free_after_graphs_bytes"], budget=budget)
    low, high = case["expect"]["max_prefill_length"]
    assert low <= found["--max-prefill-length"] <= high
    low, high = case["expect"]["memory_ratio"]
    assert low <= found["--memory-ratio"] <= high


def test_nothing_is_recommended_where_a_full_chunk_fits() -> None:
    assert values([Point(8192, 1000 * MIB)], 1200 * MIB) == {}


def test_a_ratio_that_governs_nothing_is_never_recommended() -> None:
    budget = Budget(0.9, 15 * GIB, False, True, (Pool("--num-tokens", 1_000_000, 4096, 64),))
    found = values([Point(2048, 400 * MIB)], 600 * MIB, budget=budget)
    assert set(found) == {"--max-prefill-length", "--num-tokens"}
    assert found["--num-tokens"] % 64 == 0


def test_a_chunk_flag_without_effect_is_never_recommended() -> None:
    budget = Budget(0.9, 15 * GIB, False, False, (Pool("--num-tokens", 1_000_000, 4096, 128),))
    assert set(values([Point(2048, 400 * MIB)], 600 * MIB, budget=budget)) == {"--num-tokens"}


def test_a_pool_is_never_made_smaller_than_its_floor() -> None:
    budget = Budget(0.9, 15 * GIB, False, False, (Pool("--moe-cache-size", 600, 2 * MIB, 1, 512),))
    assert values([Point(2048, 400 * MIB)], 600 * MIB, budget=budget) == {}


def test_no_points_no_need() -> None:
    with pytest.raises(ValueError, match="no measured shape"):
        need_at([], 8192)


def test_a_measured_size_is_answered_as_measured() -> None:
    points = [Point(1024, 348 * MIB), Point(2048, 424 * MIB)]
    assert need_at(points, 2048) == 424 * MIB
    assert need_at(points, 1536) == 386 * MIB


def test_far_extrapolation_does_not_read_low() -> None:
    """Measured on one GPU with the Flash-Next geometry: 264, 424, 846 and 1682 MiB at 1024 ... 8192 tokens."""
    estimate = need_at([Point(1024, 264 * MIB), Point(2048, 424 * MIB)], 8192)
    assert 1682 * MIB <= estimate <= 1682 * MIB * 1.02


def test_sizes_close_together_do_not_say_how_the_need_grows() -> None:
    """Measured on one GPU: needs are whole pages, and 1642 MiB were needed for 8192 tokens."""
    measured = [(1024, 348), (1472, 360), (1664, 384), (1920, 384), (2048, 424)]
    estimate = need_at([Point(tokens, mib * MIB) for tokens, mib in measured], 8192)
    assert 1642 * MIB <= estimate <= 1642 * MIB * 1.05


points_strategy = st.lists(
    st.builds(Point, st.integers(64, 65536), st.integers(MIB, 8 * GIB)),
    min_size=1,
    max_size=4,
    unique_by=lambda p: p.tokens,
).map(lambda points: [Point(p.tokens, max(q.need_bytes for q in points if q.tokens <= p.tokens)) for p in points])
situations = st.fixed_dictionaries(
    {
        "points": points_strategy,
        "chunk": st.integers(64, 131072),
        "headroom_bytes": st.integers(0, 8 * GIB),
        "margin_bytes": st.integers(0, 2 * GIB),
        "ratio": st.floats(0.01, 1.0),
        "before": st.integers(GIB, 200 * GIB),
        "align": st.sampled_from([64, 128]),
        "lowest": st.floats(0.0, 1.0),
    }
)


def solve(s: dict, **change: object) -> list:  # type: ignore[type-arg]
    s = s | change
    return recommend(
        s["points"],
        chunk=s["chunk"],
        headroom_bytes=s["headroom_bytes"],
        margin_bytes=s["margin_bytes"],
        budget=Budget(s["ratio"], s["before"], True, True, (Pool("--num-tokens", 1 << 20, 4096, 64),)),
        align=s["align"],
        lowest_ratio=s["lowest"],
    )


@given(situations)
def test_nothing_is_recommended_that_its_own_numbers_say_does_not_fit(s: dict) -> None:  # type: ignore[type-arg]
    for candidate in solve(s):
        assert candidate.leaves_bytes >= s["margin_bytes"] - 1
        for flag, value in candidate.flags.items():
            if flag == "--max-prefill-length":
                assert 0 < value < s["chunk"]
                assert value % s["align"] == 0
                assert need_at(s["points"], int(value)) + s["margin_bytes"] <= s["headroom_bytes"]
            elif flag == "--memory-ratio":
                assert s["lowest"] <= value < s["ratio"]
                assert 0 < value <= 1
                assert value == round(value, 2)
            else:
                assert value % 64 == 0


@given(situations, st.integers(0, GIB))
def test_more_headroom_never_makes_a_chunk_or_a_ratio_smaller(s: dict, more: int) -> None:  # type: ignore[type-arg]
    def best(candidates: list) -> dict[str, float]:  # type: ignore[type-arg]
        return {flag: value for candidate in candidates for flag, value in candidate.flags.items()}

    less, greater = best(solve(s)), best(solve(s, headroom_bytes=s["headroom_bytes"] + more))
    assume(greater)
    for flag, value in less.items():
        assert greater.get(flag, 0) >= value


@given(situations, st.integers(0, GIB))
def test_a_larger_margin_never_makes_a_chunk_or_a_ratio_larger(s: dict, more: int) -> None:  # type: ignore[type-arg]
    small = {flag: value for candidate in solve(s) for flag, value in candidate.flags.items()}
    large = {
        flag: value
        for candidate in solve(s, margin_bytes=s["margin_bytes"] + more)
        for flag, value in candidate.flags.items()
    }
    for flag, value in large.items():
        if flag in small:
            assert value <= small[flag]


@given(points_strategy, st.integers(1, 200_000), st.integers(0, 100_000))
def test_a_longer_chunk_never_needs_less(points: list[Point], tokens: int, more: int) -> None:
    assert need_at(points, tokens) <= need_at(points, tokens + more)
