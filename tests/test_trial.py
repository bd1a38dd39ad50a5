"""The searches for a chunk and a ratio, against any need that never falls with tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefill_probe.advice import Point
from prefill_probe.engine import Budget, Geometry, PlanRefused
from prefill_probe.trial import MOST_RUNS, Flags, Trial, highest_ratio, largest_chunk

MIB, GIB = 1 << 20, 1 << 30
MARGIN = 128 * MIB


class Card:
    """A chunk of T tokens takes fixed + T * slope + curve * T^2 bytes, in steps of 2 MiB, and fails beyond headroom."""

    def __init__(self, headroom: int, fixed: int, slope: float, curve: float = 0.0) -> None:
        self.headroom, self.fixed, self.slope, self.curve = headroom, fixed, slope, curve
        self.runs: list[int] = []

    def need(self, tokens: int) -> int:
        exact = self.fixed + tokens * self.slope + self.curve * tokens * tokens
        return -(-int(exact) // (2 * MIB)) * 2 * MIB

    def run(self, tokens: int) -> Trial:
        self.runs.append(tokens)
        need = self.need(tokens)
        if need > self.headroom:
            return Trial(tokens, None, -1, tokens / 10_000)
        return Trial(tokens, need, self.headroom - need, tokens / 10_000)


cards = st.builds(
    Card,
    headroom=st.integers(200 * MIB, 4 * GIB),
    fixed=st.integers(0, 300 * MIB),
    slope=st.floats(0.02 * MIB, 0.5 * MIB),
    curve=st.floats(0, 8.0),
)


def points(card: Card, *tokens: int) -> list[Point]:
    return [Point(each, card.need(each)) for each in tokens if card.need(each) <= card.headroom]


@given(cards, st.sampled_from([2048, 4096, 8192, 16384, 32768]))
@example(Card(headroom=471859200, fixed=192526060, slope=21697.0, curve=0.0), 8192)
@example(Card(headroom=209715200, fixed=34976001, slope=21827.0, curve=0.0), 16384)
@example(Card(headroom=295698432, fixed=110285691, slope=36362.0, curve=1.0), 32768)
@example(Card(headroom=531278507, fixed=299468691, slope=22368.0, curve=0.0), 8192)
@settings(max_examples=300)
def test_the_chunk_that_is_found_was_run_and_leaves_the_margin_and_is_not_timid(card: Card, chunk: int) -> None:
    if card.need(chunk) + MARGIN <= card.headroom:
        return
    known = points(card, 64, 512, 1024)
    found = largest_chunk(card.run, known, chunk=chunk, headroom_bytes=card.headroom, margin_bytes=MARGIN, align=64)
    assert len(card.runs) <= MOST_RUNS
    assert all(tokens % 64 == 0 and 0 < tokens < chunk for tokens in card.runs)
    too_large = [each.tokens for each in known if each.need_bytes + MARGIN > card.headroom]
    assert all(tokens < min(too_large, default=chunk) for tokens in card.runs), "known before it was run"
    if found is None:
        assert card.need(64) + MARGIN > card.headroom or chunk > 64 * 2**MOST_RUNS
        return
    assert found.tokens in card.runs
    assert card.need(found.tokens) + MARGIN <= card.headroom
    larger = found.tokens + max(256, found.tokens // 10)
    assert larger >= chunk or card.need(larger) + MARGIN > card.headroom


def test_the_search_stops_when_its_time_is_up() -> None:
    card = Card(600 * MIB, 200 * MIB, 0.1 * MIB, 4.0)
    known = [Point(64, card.need(64))]
    largest_chunk(card.run, known, chunk=8192, headroom_bytes=600 * MIB, margin_bytes=MARGIN, align=64, seconds=0)
    assert len(card.runs) == 1


class Pools:
    """Pools that give back their share of memory as the ratio falls, down to a floor."""

    def __init__(self, card: Card, ratio: float, before: int, floor: float) -> None:
        self.card, self.ratio, self.before, self.floor = card, ratio, before, floor
        self.tried: list[float] = []

    def run(self, flags: Flags, tokens: int) -> tuple[Trial, Geometry]:
        ratio = float(flags["--memory-ratio"])
        self.tried.append(ratio)
        if ratio < self.floor:
            raise PlanRefused("cache budget too small")
        headroom = self.card.headroom + int((self.ratio - ratio) * self.before)
        need = self.card.need(tokens)
        fits = need <= headroom
        size = int(ratio * self.before)
        return Trial(tokens, need if fits else None, headroom - need if fits else -1, 0.5), Geometry(
            size // 1000, None, size
        )


@given(cards, st.floats(0.5, 0.99), st.integers(8 * GIB, 96 * GIB), st.floats(0.1, 0.9))
@settings(max_examples=300)
def test_the_ratio_that_is_found_was_run_and_is_the_highest_step_that_leaves_the_margin(
    card: Card, ratio: float, before: int, floor: float
) -> None:
    tokens = 8192
    if card.need(tokens) + MARGIN <= card.headroom:
        return
    pools = Pools(card, ratio, before, floor)
    budget = Budget(ratio, before, True, True)
    known = points(card, 64, 1024) or [Point(64, card.need(64))]
    try:
        found = highest_ratio(
            pools.run, known, tokens=tokens, headroom_bytes=card.headroom, margin_bytes=MARGIN, budget=budget
        )
    except PlanRefused:
        exact = ratio - (card.need(tokens) + MARGIN - card.headroom) / before
        assert exact < floor + 0.02 or len(pools.tried) == MOST_RUNS
        return
    value = float(found.flags["--memory-ratio"])
    assert value in pools.tried
    assert 0 < value < ratio
    assert value >= floor
    assert found.trial.leaves_bytes >= MARGIN
    headroom_above = card.headroom + int((ratio - value - 0.01) * before)
    assert value + 0.01 >= ratio or headroom_above - card.need(tokens) < MARGIN + 1 or len(pools.tried) == MOST_RUNS
    assert math.isclose(value * 100, round(value * 100))


def test_explicit_pools_have_no_ratio() -> None:
    with pytest.raises(PlanRefused, match="explicit"):
        highest_ratio(
            lambda flags, tokens: pytest.fail("run"),
            [Point(64, MIB)],
            tokens=64,
            headroom_bytes=0,
            margin_bytes=0,
            budget=Budget(0.9, 16 * GIB, False, True),
        )
