"""Shapes: admissible, as large as the limits allow, and as hard as their kind can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_probe.shape import FAMILIES, Limits, full_chunk, packed_chunk

limits = st.builds(
    Limits,
    requested_chunk=st.just(8192),
    budget=st.integers(1, 300_000),
    budget_capped_by=st.just(""),
    align=st.just(64),
    longest_prompt=st.integers(1, 300_000),
    max_sequences=st.integers(1, 64),
    page_tokens=st.sampled_from([1, 16, 64]),
    kv_pages=st.integers(2, 100_000),
    state_tokens=st.sampled_from([0, 64]),
)


@given(limits)
@settings(max_examples=200)
def test_a_full_chunk_is_admissible_and_as_large_as_the_limits_allow(given_limits: Limits) -> None:
    if given_limits.page_tokens * given_limits.kv_pages < 3:
        return
    shape = full_chunk(given_limits)
    lengths = [sequence.new_tokens for sequence in shape.sequences]
    page = given_limits.page_tokens
    assert sum(lengths) <= given_limits.budget
    assert len(lengths) <= given_limits.max_sequences
    assert max(lengths) <= given_limits.longest_prompt
    assert sum(-(-(length + 1) // page) for length in lengths) <= given_limits.kv_pages
    if given_limits.budget <= given_limits.longest_prompt and (given_limits.budget + 1) <= page * given_limits.kv_pages:
        assert lengths == [given_limits.budget]


@given(limits, st.sampled_from(FAMILIES), st.integers(1, 300_000))
@settings(max_examples=400)
def test_every_shape_is_admissible(given_limits: Limits, family: object, tokens: int) -> None:
    if given_limits.page_tokens * given_limits.kv_pages < 3:
        return
    shape = family.shape(given_limits, tokens, tokens)  # type: ignore[attr-defined]
    if shape is None:
        return
    page = given_limits.page_tokens
    lengths = [each.cached_tokens + each.new_tokens + (not shape.final) for each in shape.sequences]
    assert max(lengths) <= given_limits.longest_prompt
    assert len(lengths) + shape.decodes <= given_limits.max_sequences
    taken = sum(-(-(length + 1) // page) for length in lengths) + shape.decodes * -(-(64 + 8) // page)
    assert taken <= given_limits.kv_pages
    assert all(each.cached_tokens % given_limits.align == 0 for each in shape.sequences)
    if family.word != "full":  # type: ignore[attr-defined]
        assert shape.new_tokens == tokens
    assert shape.restored == (shape.cached_tokens > 0 and given_limits.state_tokens > 0)


@given(st.integers(2, 64), st.integers(64, 20_000))
@settings(max_examples=200)
def test_a_packed_chunk_needs_as_many_state_entries_as_any_split_can(sequences: int, tokens: int) -> None:
    shape = packed_chunk(Limits(8192, 8192, "", 64, 1 << 20, sequences, 1, 1 << 20, 64), tokens, "packed chunk")
    assert shape is not None
    entries = sum(-(-each.new_tokens // 64) for each in shape.sequences)
    # No split has more: each sequence wastes at most 63 tokens of its last entry.
    assert entries == max(-(-tokens // 64), min(tokens, (tokens + 63 * sequences) // 64))


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("packed", {"state_tokens": 0}),
        ("packed", {"max_sequences": 1}),
        ("decode", {"max_sequences": 1}),
        ("image", {}),
    ],
)
def test_a_kind_that_cannot_be_is_none(word: str, changes: dict[str, int]) -> None:
    family = next(each for each in FAMILIES if each.word == word)
    given = {"state_tokens": 64, "max_sequences": 4} | changes
    assert family.shape(Limits(8192, 8192, "", 64, 1 << 18, page_tokens=64, kv_pages=9999, **given), 8192, 8192) is None


def test_a_smaller_shape_says_its_size() -> None:
    limits = Limits(8192, 8192, "", 64, 1 << 18, 4, 64, 9999, 64)
    names = [family.shape(limits, 512, 8192).name for family in FAMILIES[:3]]  # type: ignore[union-attr]
    assert names == ["512 tokens", "first chunk of 512 tokens", "deepest chunk of 512 tokens"]
