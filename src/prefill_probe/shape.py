"""Shapes: the synthetic batches that the probe runs, made from the limits of an engine."""

from __future__ import annotations

from collections.abc import Callable
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
    """One synthetic batch: what one prefill forward is given.

    Attributes:
        name: what it is called in the record.
        sequences: in the order in which they are admitted.
        final: whether the prompts end with this chunk, so that a token is sampled for a client.
        decodes: requests that generate meanwhile; their last step is still alive when the chunk is launched.
        restored: whether the cached tokens are a prefix hit, so that recurrent state is restored from a snapshot.
        image: whether the prompt begins with the largest image that the engine accepts.
    """

    name: str
    sequences: tuple[Sequence, ...]
    final: bool = True
    decodes: int = 0
    restored: bool = False
    image: bool = False

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
        state_tokens: tokens of a sequence that share one entry of the state that recurrent layers (GDN, KDA) keep
            while a chunk runs; 0 without such layers.
        images: whether the engine encodes images.
    """

    requested_chunk: int
    budget: int
    budget_capped_by: str
    align: int
    longest_prompt: int
    max_sequences: int
    page_tokens: int
    kv_pages: int
    state_tokens: int = 0
    images: bool = False


# Of a request that generates beside a chunk: short, since what it holds of the KV pool is no transient.
DECODE_PROMPT_TOKENS = 64
DECODE_OUTPUT_TOKENS = 8


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
        length = min(left, _longest(limits, pages))
        if length < 1:
            break
        sequences.append(Sequence(0, length))
        left -= length
        pages -= _pages(limits, length + 1)
    if not sequences:
        raise ValueError(f"the engine admits no prompt: {limits}")
    return Shape(name, tuple(sequences))


def full_chunk(limits: Limits) -> Shape:
    """The largest chunk that the scheduler can issue from empty caches."""
    return fill_chunk(limits, limits.budget, "full chunk")


def first_chunk(limits: Limits, tokens: int, name: str) -> Shape | None:
    """The first chunk of a prompt that is longer; None where no prompt can be."""
    if tokens + 1 > _longest(limits, limits.kv_pages):
        return None
    return Shape(name, (Sequence(0, tokens),), final=False)


def deepest_chunk(limits: Limits, tokens: int, name: str) -> Shape | None:
    """The last chunk of the longest prompt that the pools admit: a prefix hit, beside every other running request.

    None where the pools admit no prompt longer than a chunk.
    """
    decodes = _decodes(limits)
    room = limits.kv_pages - decodes * _pages(limits, DECODE_PROMPT_TOKENS + DECODE_OUTPUT_TOKENS + limits.page_tokens)
    cached = (_longest(limits, room) - tokens) // limits.align * limits.align
    if cached < limits.align:
        return None
    return Shape(name, (Sequence(cached, tokens),), decodes=decodes, restored=limits.state_tokens > 0)


def prefix_chunk(limits: Limits, tokens: int, name: str) -> Shape | None:
    """A chunk after a prefix hit of one chunk; None where the pools admit no prompt of two."""
    cached = max(limits.align, tokens // limits.align * limits.align)
    if cached + tokens > _longest(limits, limits.kv_pages):
        return None
    return Shape(name, (Sequence(cached, tokens),), restored=limits.state_tokens > 0)


def beside_decodes(limits: Limits, tokens: int, name: str) -> Shape | None:
    """A chunk of an empty cache while every other running request generates; None where only one can run."""
    decodes = _decodes(limits)
    room = limits.kv_pages - decodes * _pages(limits, DECODE_PROMPT_TOKENS + DECODE_OUTPUT_TOKENS + limits.page_tokens)
    if decodes < 1 or tokens > _longest(limits, room):
        return None
    return Shape(name, (Sequence(0, tokens),), decodes=decodes)


def image_chunk(limits: Limits, tokens: int, name: str) -> Shape | None:
    """A chunk that begins with the largest image; None where the engine encodes none."""
    if not limits.images or tokens + 1 > _longest(limits, limits.kv_pages):
        return None
    return Shape(name, (Sequence(0, tokens),), image=True)


def packed_chunk(limits: Limits, tokens: int, name: str) -> Shape | None:
    """As many sequences as can run, sharing ``tokens`` so that their state needs the most entries.

    A sequence of n tokens takes ceil(n / state_tokens) entries, so lengths are one above a multiple. None without
    recurrent layers, or where only one sequence can run.
    """
    unit = limits.state_tokens
    if unit < 1:
        return None
    for count in range(min(limits.max_sequences, tokens), 1, -1):
        units, rest = divmod(tokens - count, unit)
        lengths = [1 + unit * (units // count + (number < units % count)) for number in range(count)]
        lengths[-1] += rest
        if max(lengths) <= limits.longest_prompt and sum(_pages(limits, n + 1) for n in lengths) <= limits.kv_pages:
            return Shape(name, tuple(Sequence(0, length) for length in lengths))
    return None


@dataclass(frozen=True)
class Family:
    """A kind of chunk, at any size.

    Attributes:
        word: what a user calls it.
        name: what the record calls it at full size.
        make: the shape of so many new tokens under these limits, by that name; None where there can be none.
    """

    word: str
    name: str
    make: Callable[[Limits, int, str], Shape | None]

    def shape(self, limits: Limits, tokens: int, full: int) -> Shape | None:
        """The shape of ``tokens`` new tokens; ``full`` is the size at which it bears the family's own name."""
        plain = self is PLAIN
        name = self.name if tokens >= full else f"{tokens} tokens" if plain else f"{self.name} of {tokens} tokens"
        return self.make(limits, tokens, name)


PLAIN = Family("full", "full chunk", fill_chunk)
FAMILIES = (
    PLAIN,
    Family("first", "first chunk", first_chunk),
    Family("deep", "deepest chunk", deepest_chunk),
    Family("packed", "packed chunk", packed_chunk),
    Family("prefix", "chunk after a prefix hit", prefix_chunk),
    Family("decode", "chunk beside decodes", beside_decodes),
    Family("image", "chunk with an image", image_chunk),
)
# The fewest that cover the others: the deepest chunk is a prefix hit beside decodes.
AUTOMATIC = ("full", "deep", "packed", "image")


def _longest(limits: Limits, pages: int) -> int:
    """Tokens of the longest prompt that ``pages`` pages admit; every prompt reserves one token to generate."""
    return min(limits.longest_prompt, pages * limits.page_tokens - 1)


def _pages(limits: Limits, tokens: int) -> int:
    return -(-tokens // limits.page_tokens)


def _decodes(limits: Limits) -> int:
    return max(0, limits.max_sequences - 1)


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
