"""What a peak is made of, from an allocator's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prefill_probe.composition import TIMELINE_POINTS, Block, Frame, blocks_at_peak, compose, timeline


def alloc(address: int, size: int, name: str = "f") -> dict[str, Any]:
    return {
        "action": "alloc",
        "addr": address,
        "size": size,
        "frames": [{"filename": "m.py", "line": 1, "name": name}],
    }


def free(address: int) -> dict[str, Any]:
    return {"action": "free_completed", "addr": address, "size": 0, "frames": []}


def test_only_what_is_held_together_at_the_highest_moment_counts() -> None:
    events = [alloc(1, 10), alloc(2, 30), free(2), alloc(3, 25), alloc(1 << 40, 1), free(1), alloc(4, 5)]
    assert sorted(block.size_bytes for block in blocks_at_peak(events)) == [10, 30]


def test_frees_of_older_blocks_and_other_actions_are_passed_over() -> None:
    requested = {"action": "free_requested", "addr": 1, "size": 10, "frames": []}
    segment = {"action": "segment_alloc", "addr": 1, "size": 2 << 20, "frames": []}
    events = [free(99), segment, alloc(1, 10), requested, alloc(2, 10), free(1), free(2)]
    assert len(blocks_at_peak(events)) == 2


def test_an_address_that_is_used_again_is_another_block() -> None:
    assert [block.size_bytes for block in blocks_at_peak([alloc(1, 10), free(1), alloc(1, 20)])] == [20]


def test_components_are_summed_and_the_largest_block_is_placed() -> None:
    blocks = [Block(10, (("a.py", 1, "GDN"),)), Block(30, (("b.py", 2, "MoE"),)), Block(25, (("a.py", 3, "GDN"),))]
    made = compose(blocks, lambda frames: (frames[0][2], f"{frames[0][2]} ({frames[0][0]}:{frames[0][1]})"))
    assert made is not None
    assert list(made.components.items()) == [("GDN", 35), ("MoE", 30)]
    assert (made.largest_bytes, made.largest_site) == (30, "MoE (b.py:2)")
    assert compose([], lambda frames: ("", "")) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(1, 1000)), max_size=60))
def test_the_blocks_add_up_to_the_highest_sum(steps: list[tuple[bool, int, int]]) -> None:
    live: dict[int, int] = {}
    highest, events = 0, []
    for is_free, address, size in steps:
        if is_free or address in live:
            live.pop(address, None)
            events.append(free(address))
        else:
            live[address] = size
            events.append(alloc(address, size))
        highest = max(highest, sum(live.values()))
    assert sum(block.size_bytes for block in blocks_at_peak(events)) == highest


def component(frames: Sequence[Frame]) -> tuple[str, str]:
    return (frames[0][2], "") if frames else ("other", "")


def test_a_timeline_says_what_was_live_in_which_layer() -> None:
    events = [
        alloc(1, 5, "embedding"),  # before the first layer
        alloc(2, 20, "GDN"), free(2),
        alloc(3, 10, "GDN"),  # between the layers: the first one's
        alloc(4, 40, "MoE"), free(4), free(3),
        alloc(5, 1, "head"),
    ]  # fmt: skip
    marks = [(101, 0), (102, -1), (103, 1), (104, -1)]
    found = timeline(events, marks, 100, component)
    assert found is not None
    assert found.layers == (-1, 0, 0, 0, 1, 1, 1, -1)
    assert found.components == {
        "MoE": (0, 0, 0, 0, 40, 40, 0, 0),
        "GDN": (0, 20, 20, 10, 10, 10, 10, 0),
        "embedding": (5, 5, 5, 5, 5, 5, 5, 5),
        "head": (0, 0, 0, 0, 0, 0, 0, 1),
    }


def test_a_timeline_of_nothing_is_none() -> None:
    assert timeline([], [(0, 0)], 0, component) is None
    assert timeline([free(1)], [], 0, component) is None


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(1, 1000)), min_size=1, max_size=1200),
    st.lists(st.integers(0, 400), max_size=70),
)
def test_a_timeline_is_short_and_keeps_the_peak(steps: list[tuple[bool, int, int]], begins: list[int]) -> None:
    live: dict[int, int] = {}
    highest, events = 0, []
    for is_free, address, size in steps:
        if is_free or address in live:
            live.pop(address, None)
            events.append(free(address))
        else:
            live[address] = size
            events.append(alloc(address, size, f"part {address % 3}"))
        highest = max(highest, sum(live.values()))
    marks = [mark for i, at in enumerate(sorted(begins)) for mark in ((at, i), (at, -1))]
    found = timeline(events, marks, 0, component)
    if highest == 0:
        assert found is None
        return
    assert found is not None
    totals = [sum(parts) for parts in zip(*found.components.values(), strict=True)]
    assert max(totals) == highest
    assert len(totals) == len(found.layers) <= 2 * TIMELINE_POINTS
    assert min(min(parts) for parts in found.components.values()) >= 0
