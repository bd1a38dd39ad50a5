"""Shapes: the synthetic batches that the probe runs, made from the limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sequence:
    """One sequence's part of a chunk.

    Attributes:
        cached_tokens: tokens before the chunk, already in the caches.
        new_tokens: tokens of this chunk.
    """

    cached_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Shape:
    """One synthetic batch: what one prefill forward is given."""

    name: str
    sequences: tuple[Sequence, ...]

    @property
    def new_tokens(self) -> int:
        """Tokens that the forward processes, over all sequences."""
        return sum(sequence.new_tokens for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Tokens before the chunk, over all sequences."""
        return sum(sequence.cached_tokens for sequence in self.sequences)


@dataclass(frozen=True)
class Limits:
    """What bounds a chunk of an engine.

    Attributes:
        requested_chunk: tokens asked for by flag.
        budget: tokens that the scheduler gives one prefill pass.
        budget_capped_by: what made ``budget`` smaller than ``requested_chunk``; empty if nothing did.
        align: tokens; a recommended chunk is a multiple of it.
        longest_prompt: tokens of the longest admissible prompt.
        max_sequences: sequences that can be admitted together.
        page_tokens: tokens of one KV page.
        kv_pages: pages of the KV pool.
    """

    requested_chunk: int
    budget: int
    budget_capped_by: str
    align: int
    longest_prompt: int
    max_sequences: int
    page_tokens: int
    kv_pages: int


def fill_chunk(limits: Limits, tokens: int, name: str) -> Shape:
    """The batch with the fewest sequences that holds ``tokens`` new tokens, or as many as the engine admits.

    One prompt where one prompt can be that long, else several. Every sequence also reserves one token to generate,
    as a request does.

    Raises:
        ValueError: the engine admits no prompt at all.
    """
    sequences: list[Sequence] = []
    left, pages = tokens, limits.kv_pages
    while left > 0 and pages > 0 and len(sequences) < limits.max_sequences:
        length = min(left, limits.longest_prompt, pages * limits.page_tokens - 1)
        if length < 1:
            break
        sequences.append(Sequence(0, length))
        left -= length
        pages -= -(-(length + 1) // limits.page_tokens)
    if not sequences:
        raise ValueError(f"the engine admits no prompt: {limits}")
    return Shape(name, tuple(sequences))


def full_chunk(limits: Limits) -> Shape:
    """The largest chunk that the scheduler can issue from empty caches."""
    return fill_chunk(limits, limits.budget, "full chunk")


def largest_power_of_two_below(tokens: int) -> int:
    """The largest power of two smaller than ``tokens`` (at least 1)."""
    return max(1, 1 << max(0, (tokens - 1).bit_length() - 1))


def capped_by(limits: Limits, effective: int) -> str:
    """Why the effective chunk is smaller than the requested one, in words; empty if it is not."""
    if effective >= limits.requested_chunk:
        return ""
    if effective == limits.budget and limits.budget_capped_by:
        return limits.budget_capped_by
    longest = limits.longest_prompt * limits.max_sequences
    pool = limits.kv_pages * limits.page_tokens
    return f"the KV pool of {pool} tokens" if pool <= longest + 1 else f"the sequence limit of {limits.longest_prompt}"
