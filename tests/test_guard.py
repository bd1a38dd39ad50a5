"""The guard's decision: what its numbers say does not fit is never let through, and what fits goes on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from memory_engine import MIB, MemoryEngine

from prefill_probe import Mode, ProbeSettings, probe
from prefill_probe.guard import GRANULARITY_BYTES, Memory, Needs, fits, largest, needs_of, sizes_to_measure

ALIGN = 64
# A buffer that grows with the tokens up to a cap (no cap: as large as there is), and a constant one.
BUFFERS = st.tuples(st.integers(0, 400_000), st.integers(0, 600 * MIB))
# What is live at one moment is a sum of such buffers, and the peak is that of the worst moment.
MOMENTS = st.lists(st.tuples(st.lists(BUFFERS, max_size=4), st.integers(0, 100 * MIB)), min_size=1, max_size=4)


def true_need(moments: list[tuple[list[tuple[int, int]], int]], tokens: int) -> int:
    return max(constant + sum(min(each * tokens, cap) for each, cap in buffers) for buffers, constant in moments)


def measured(
    moments: list[tuple[list[tuple[int, int]], int]], full: int, fragments: int = 0, in_hand: int = 0
) -> Needs:
    """``in_hand``: the first so many bytes lie in memory that the allocator has when idle."""
    sizes = sorted({ALIGN, full, *sizes_to_measure(full, ALIGN)})
    allocated = tuple(true_need(moments, size) for size in sizes)
    return Needs(tuple(sizes), tuple(max(0, each - in_hand) for each in allocated), allocated, fragments)


@given(MOMENTS, st.integers(1, 200), st.integers(1, 20_000), st.integers(0, 64 * MIB))
def test_what_a_chunk_takes_is_never_more_than_the_bound(moments: list, units: int, tokens: int, in_hand: int) -> None:
    needs = measured(moments, units * ALIGN, in_hand=in_hand)
    takes = max(0, true_need(moments, tokens) - in_hand)
    assert takes <= needs.at(tokens)
    if tokens in needs.sizes:
        assert needs.at(tokens) == takes


@given(MOMENTS, st.integers(1, 200), st.integers(1, 20_000), st.integers(1, 20_000))
def test_a_larger_chunk_is_never_taken_for_a_smaller_need(moments: list, units: int, one: int, other: int) -> None:
    needs = measured(moments, units * ALIGN)
    assert needs.at(min(one, other)) <= needs.at(max(one, other))


@given(
    MOMENTS, st.integers(1, 200), st.integers(1, 20_000), st.integers(0, 2048 * MIB), st.integers(0, 2048 * MIB),
    st.integers(0, 64 * MIB),
)  # fmt: skip
def test_the_largest_chunk_that_fits_is_found_and_no_larger_one(
    moments: list, units: int, budget: int, free: int, unused: int, fragments: int
) -> None:
    needs, memory = measured(moments, units * ALIGN, fragments), Memory(free, unused)
    found = largest(needs, budget, memory, ALIGN)
    assert found == budget or (found < budget and found % ALIGN == 0)
    if found:
        assert fits(needs, found, memory)
        assert true_need(moments, found) <= free + unused
    if found < budget:
        assert not fits(needs, budget, memory)
        assert found + ALIGN >= budget or not fits(needs, found + ALIGN, memory)
    if fits(needs, min(ALIGN, budget), memory):
        assert found >= min(ALIGN, budget)  # it goes on, if only by one unit


@given(MOMENTS, st.integers(1, 200), st.integers(1, 20_000), st.integers(0, 2048 * MIB), st.integers(0, 64 * MIB))
def test_more_memory_never_makes_a_smaller_chunk(moments: list, units: int, budget: int, free: int, more: int) -> None:
    needs = measured(moments, units * ALIGN)
    assert largest(needs, budget, Memory(free, 0), ALIGN) <= largest(needs, budget, Memory(free + more, 0), ALIGN)


def test_memory_in_pieces_counts_less_by_what_was_measured() -> None:
    needs = Needs((8192,), (1000 * MIB,), (990 * MIB,), 30 * MIB)
    assert fits(needs, 8192, Memory(1000 * MIB, 0))
    assert not fits(needs, 8192, Memory(400 * MIB, 629 * MIB))
    assert fits(needs, 8192, Memory(400 * MIB, 630 * MIB))


def test_needs_are_of_every_shape_at_every_size_without_what_only_a_first_run_takes() -> None:
    def deeper(shape: object) -> int:
        return 300 * MIB if getattr(shape, "cached_tokens", 0) else 0

    engine = MemoryEngine(4096 * MIB, extra=deeper, first_extra=256 * MIB, fragments_each_run=10 * MIB)
    record = probe(engine, ProbeSettings(guard=True))
    needs = needs_of(record)
    assert needs is not None
    assert needs.sizes == (64, 2048, 8192)
    per_token, fixed = engine.per_token, engine.fixed
    # 64 tokens are run once, over the leavings of others: what it took afresh is not known, and not guessed.
    assert dict(zip(needs.sizes, needs.bytes, strict=True))[8192] == fixed + 8192 * per_token + 300 * MIB
    assert dict(zip(needs.sizes, needs.bytes, strict=True))[2048] == fixed + 2048 * per_token + 300 * MIB
    assert needs.fragments_bytes > 0


def test_a_size_at_which_only_a_plain_chunk_was_run_bounds_no_other() -> None:
    def deeper(shape: object) -> int:
        return 900 * MIB if getattr(shape, "cached_tokens", 0) else 0

    engine = MemoryEngine(4096 * MIB, extra=deeper)
    record = probe(engine, ProbeSettings(guard=True))
    assert any(run.new_tokens == 5120 and not run.cached_tokens for run in record.shapes)
    needs = needs_of(record)
    assert needs is not None
    for tokens in (4096, 5120, 6144):
        assert needs.at(tokens) >= engine.fixed + tokens * engine.per_token + 900 * MIB


def test_without_the_guard_nothing_smaller_is_run() -> None:
    with_guard, without = (
        probe(MemoryEngine(4096 * MIB), ProbeSettings(guard=guard)).shapes for guard in (True, False)
    )
    assert {run.new_tokens for run in without} == {64, 5120, 8192}
    more = with_guard[len(without) :]
    assert [(run.new_tokens, run.cached_tokens > 0) for run in more] == [(2048, True), (64, True)]


def test_a_start_that_serves_although_it_does_not_fit_knows_what_smaller_chunks_need() -> None:
    settings = ProbeSettings(guard=True, mode=Mode.WARN)
    engine = MemoryEngine(600 * MIB)
    record = probe(engine, settings)
    assert record.verdict == "does-not-fit"
    needs = needs_of(record)
    assert needs is not None
    allowed = largest(needs, 8192, Memory(600 * MIB, 0), ALIGN)
    assert 2048 <= allowed < 8192
    assert engine.fixed + allowed * engine.per_token <= 600 * MIB
    # Under enforce it will not serve, and pays for nothing more.
    enforced = probe(MemoryEngine(600 * MIB), replace(settings, mode=Mode.ENFORCE))
    assert len(enforced.shapes) < len(record.shapes)


def test_nothing_came_back_so_nothing_is_known() -> None:
    engine = MemoryEngine(1 * MIB, refuses_to_resize=True)
    assert needs_of(probe(engine, ProbeSettings(guard=True, mode=Mode.WARN))) is None


def test_rounding_is_added_between_sizes_only() -> None:
    needs = Needs((1024, 4096), (90 * MIB, 1000 * MIB), (100 * MIB, 1000 * MIB))
    assert needs.at(2048) == 200 * MIB + GRANULARITY_BYTES
    assert (needs.at(1024), needs.at(4096)) == (90 * MIB, 1000 * MIB)
