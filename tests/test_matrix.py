"""The cells of the acceptance matrix: how many, which, in what order, and what is left to run."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import matrix
import truth

from prefill_probe import geometry

ALL = [cell for _, cells in matrix.by_start(matrix.ladders()) for cell in cells]


def test_there_are_two_hundred_cells_with_names_of_their_own_and_a_reason() -> None:
    assert len(ALL) >= 200
    assert len({cell.name for cell in ALL}) == len(ALL)
    assert all(cell.why for cell in ALL)


def test_they_vary_in_all_that_the_need_depends_on() -> None:
    ladders = {cell.ladder for cell in ALL}
    assert {ladder.start.geometry for ladder in ladders} == set(geometry.NAMES)
    assert {ladder.visible_gib for ladder in ladders} >= {0, 8, 12, 15.5, 24, 32}
    assert {ladder.chunk for ladder in ladders} >= {512, 1024, 2048, 4096, 8192, 16384, 32768}
    assert {ladder.start.running for ladder in ladders} >= {1, 4, 16, 64}
    assert {ladder.start.expandable for ladder in ladders} == {True, False}


def test_headrooms_surround_the_need_closely_and_on_both_sides() -> None:
    steps = sorted(matrix.STEPS)
    below, above = [step for step in steps if step < 1], [step for step in steps if step > 1]
    assert max(below) >= 0.99
    assert min(above) <= 1.01
    assert len(below) >= 3
    assert len(above) >= 3


def test_the_need_is_measured_before_it_is_asked_for_and_headroom_shrinks_from_there() -> None:
    for _, cells in matrix.by_start(matrix.ladders()):
        *rest, last = cells
        assert last.step == -1
        assert last.ladder == cells[0].ladder
        for before, after in pairwise(rest):
            assert after.step == 0 or (after.ladder == before.ladder and (before.step == 0 or after.step < before.step))


def test_what_is_left_brings_its_ladders_need_along() -> None:
    [(_, cells), *_] = matrix.by_start(matrix.ladders())
    missing = cells[3]
    left = matrix.left_of(cells, lambda name: name != missing.name)
    assert left == [cells[0], missing]
    assert matrix.left_of(cells, lambda name: True) == []


def test_a_quick_look_is_part_of_the_whole_in_one_start() -> None:
    quick = list(matrix.by_start(matrix.ladders(quick=True)))
    assert len(quick) == 1
    assert set(quick[0][1]) <= set(ALL)


def test_a_start_of_its_own_has_the_flags_of_its_cell_and_a_card_that_leaves_as_much() -> None:
    cell = next(cell for cell in ALL if cell.ladder.visible_gib == 12 and cell.step == 1.03)
    row = {"memory_ratio": 0.9, "headroom_bytes": 500, "card_differs_bytes": 100, "pools": {}, "truth": {}}
    order = matrix.fresh_order(cell, row)
    assert order is not None
    # A tenth of what the card has more becomes headroom.
    assert order["free_bytes"] == (12 << 30) + 1000
    assert (order["memory_ratio"], order["headroom_bytes"]) == (0.9, 500)
    assert order["name"] == f"{cell.name}, fresh start"
    assert matrix.fresh_order(cell, {}) is None


@given(some.integers(64, 32768), some.integers(1, 64))
def test_a_burst_fits_into_a_chunk_and_takes_the_most_state(chunk: int, count: int) -> None:
    lengths = truth.burst_lengths(chunk, count)
    assert len(lengths) == count
    assert sum(lengths) == chunk
    assert all(length % 64 == 1 for length in lengths[:-1])
    # No split of the chunk among so many has more: of each entry 63 of 64 tokens can be missing at most.
    assert sum(-(-length // 64) for length in lengths) >= (chunk - count) // 64 + count
