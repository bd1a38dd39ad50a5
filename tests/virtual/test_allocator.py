from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_probe.sizes import GIB, MIB
from prefill_probe.virtual.allocator import Allocator, Block, OutOfDeviceMemory, growth_of

SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 24 * MIB), st.integers(10 * MIB, 200 * MIB)
)


def allocator(capacity: int = 4 * GIB, *, expandable: bool = True) -> Allocator:
    return Allocator(lambda reserved: capacity - reserved, capacity, expandable=expandable)


@pytest.mark.parametrize(
    ("size", "growth"),
    [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB)],
)
def test_a_pool_grows_by_what_its_requests_ask_for(size: int, growth: int) -> None:
    assert growth_of(size) == growth
    one = allocator(expandable=False)
    one.allocate(size)
    assert one.reserved == growth


def test_a_request_is_rounded_up_to_512_bytes() -> None:
    one = allocator()
    one.allocate(1)
    one.allocate(513)
    assert one.allocated == 512 + 1024


def test_small_requests_share_a_page_and_large_ones_another() -> None:
    one = allocator()
    for _ in range(4):
        one.allocate(512 * 1024)
    assert one.reserved == 2 * MIB
    one.allocate(3 * MIB)
    assert one.reserved == 22 * MIB


def test_an_expandable_segment_grows_by_pages_of_20_mib() -> None:
    one = allocator()
    one.allocate(30 * MIB)
    assert one.reserved == 40 * MIB
    one.allocate(10 * MIB)
    assert one.reserved == 40 * MIB
    one.allocate(11 * MIB)
    assert one.reserved == 60 * MIB


def test_a_free_end_of_an_expandable_segment_is_completed_by_new_pages() -> None:
    one = allocator()
    first = one.allocate(40 * MIB)
    one.free(first)
    one.allocate(100 * MIB)
    assert one.reserved == 100 * MIB


def test_without_expandable_segments_a_hole_that_is_too_small_is_lost() -> None:
    one = allocator(expandable=False)
    one.free(one.allocate(40 * MIB))
    one.allocate(100 * MIB)
    assert one.reserved == 140 * MIB


def test_the_rest_of_a_large_segment_is_kept_whole_if_it_is_not_worth_splitting() -> None:
    one = allocator(expandable=False)
    assert one.allocate(11 * MIB + MIB // 2).size == 12 * MIB
    assert one.allocate(10 * MIB + 512).size == 10 * MIB + 512


def test_the_smallest_block_that_fits_is_taken() -> None:
    one = allocator(expandable=False)
    blocks = [one.allocate(size * MIB) for size in (64, 32, 48)]
    wanted = blocks[2].address
    for block in blocks:
        one.free(block)
    assert one.allocate(40 * MIB).address == wanted


def test_blocks_are_kept_by_stream() -> None:
    one = allocator()
    one.free(one.allocate(16 * MIB, stream=1))
    one.allocate(16 * MIB, stream=2)
    assert one.reserved == 40 * MIB


def test_empty_cache_gives_whole_pages_back_and_keeps_the_rest_of_pages_in_use() -> None:
    one = allocator()
    blocks = [one.allocate(15 * MIB) for _ in range(4)]
    for block in blocks[1:]:
        one.free(block)
    one.release_unused()
    assert one.reserved == 20 * MIB
    one.free(blocks[0])
    one.release_unused()
    assert (one.reserved, one.allocated) == (0, 0)


def test_out_of_memory_comes_after_unused_blocks_were_given_back_and_says_what_was_asked() -> None:
    one = allocator(100 * MIB, expandable=False)
    one.free(one.allocate(60 * MIB))
    one.allocate(70 * MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        one.allocate(30 * MIB + 1)
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (32 * MIB, 30 * MIB)
    assert one.reserved == 70 * MIB


def test_memory_of_a_captured_graph_stays_until_the_graph_is_gone() -> None:
    one = allocator()
    with one.capture(1):
        one.free(one.allocate(16 * MIB))
    one.release_unused()
    assert one.reserved == 20 * MIB
    one.allocate(16 * MIB)
    assert one.reserved == 40 * MIB
    one.forget_graph(1)
    one.release_unused()
    assert one.reserved == 20 * MIB


@pytest.mark.parametrize("expandable", [True, False])
def test_the_pools_of_graphs_are_told_apart_from_the_rest(expandable: bool) -> None:
    one = allocator(expandable=expandable)
    one.allocate(30 * MIB)
    with one.capture(1):
        kept = one.allocate(40 * MIB)
        one.free(one.allocate(MIB))
    assert one.graph_pools() == {1: 42 * MIB}
    one.release_unused()
    assert one.graph_pools() == {1: 42 * MIB}  # what a graph took stays with it
    one.free(kept)
    one.forget_graph(1)
    one.release_unused()
    assert one.graph_pools() == {}


def test_every_allocation_is_counted_and_told_to_who_listens() -> None:
    one = allocator()
    heard: list[tuple[str, int]] = []
    one.free(one.allocate(100))
    one.on_event = lambda action, block: heard.append((action, block.requested))
    one.free(one.allocate(700))
    assert heard == [("alloc", 700), ("free_completed", 700)]
    assert one.allocations == 2


def test_a_block_is_taken_back_once() -> None:
    one = allocator()
    block = one.allocate(1)
    one.free(block)
    with pytest.raises(ValueError, match="free already"):
        one.free(block)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(SIZES, st.integers(0, 1), st.booleans()), max_size=60),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_ledgers_always_agree(steps: list[tuple[int, int, bool]], expandable: bool, random: object) -> None:
    capacity = 600 * MIB
    one = allocator(capacity, expandable=expandable)
    live: list[Block] = []
    for size, stream, release in steps:
        try:
            block = one.allocate(size, stream)
        except OutOfDeviceMemory as full:
            refused = full.requested_bytes
            assert refused > one.device_free
        else:
            assert size <= block.size
            assert all(not _overlap(block, other) for other in live)
            live.append(block)
        if live and len(live) % 3 == 0:
            one.free(live.pop(random.randrange(len(live))))  # type: ignore[attr-defined]
        if release:
            one.release_unused()
        assert one.allocated == sum(block.size for block in live) <= one.reserved <= capacity
        assert one.peak_allocated >= one.allocated
        assert one.peak_reserved >= one.reserved
    for block in live:
        one.free(block)
    one.release_unused()
    assert (one.allocated, one.reserved) == (0, 0)


def _overlap(first: Block, second: Block) -> bool:
    return first.address < second.address + second.size and second.address < first.address + first.size
