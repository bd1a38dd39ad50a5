"""Advice: arithmetic over measured numbers that says which flag values are worth trying.

What comes out of ``recommend`` was not run. It is printed under "not run", or tried first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prefill_probe.engine import Budget


@dataclass(frozen=True)
class Point:
    """One measured shape: tokens of the chunk, and bytes of its transient."""

    tokens: int
    need_bytes: int


@dataclass(frozen=True)
class Candidate:
    """Flag values worth trying, with the transient expected under them and what they would leave free (bytes)."""

    flags: dict[str, int | float]
    need_bytes: int
    leaves_bytes: int
    reason: str


def need_at(points: Sequence[Point], tokens: int) -> int:
    """The transient expected for ``tokens``, in bytes, from measured points.

    A measured size is answered as measured. Between two measured sizes the line through them. Beyond the largest, the
    larger of two: the largest scaled by tokens, and the line through it and the next of at most half its size. Buffers
    grow in proportion to tokens, and what is fixed (page granularity, small buffers) flattens the line through small
    sizes, so that alone it reads too low (measured: 6 % at four times the largest size); through two sizes close
    together it says nothing, since needs are whole pages (measured: 40 % too much). Below the smallest, its own need.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("no measured shape to extrapolate from")
    known: dict[int, int] = {}
    for point in points:
        known[point.tokens] = max(point.need_bytes, known.get(point.tokens, 0))
    sizes = sorted(known)
    if tokens <= sizes[0]:
        return known[sizes[0]]
    if tokens in known:
        return known[tokens]
    above = next((size for size in sizes if size > tokens), None)
    if above is not None:
        below = sizes[sizes.index(above) - 1]
        return math.ceil(known[below] + (known[above] - known[below]) * (tokens - below) / (above - below))
    largest = sizes[-1]
    proportional = known[largest] * tokens / largest
    if len(sizes) == 1:
        return math.ceil(proportional)
    other = max((size for size in sizes if 2 * size <= largest), default=sizes[0])
    slope = (known[largest] - known[other]) / (largest - other)
    return math.ceil(max(proportional, known[largest] + slope * (tokens - largest)))


def recommend(
    points: Sequence[Point],
    *,
    chunk: int,
    headroom_bytes: int,
    margin_bytes: int,
    budget: Budget,
    align: int = 64,
    lowest_ratio: float = 0.01,
) -> list[Candidate]:
    """What is worth trying when a full chunk does not leave the margin; empty if it does, or if nothing helps.

    Args:
        points: measured shapes.
        chunk: tokens of the full chunk.
        headroom_bytes: what the process can obtain when idle.
        margin_bytes: what must remain after the need.
        budget: how memory was planned, and which flags govern it.
        align: tokens; a chunk is a multiple of it.
        lowest_ratio: the planner accepts none below.

    Returns:
        candidates, the one that costs least context first: a smaller chunk, then a lower ratio, then smaller pools.
        No candidate leaves less than the margin by its own numbers.
    """
    need = need_at(points, chunk)
    short = need + margin_bytes - headroom_bytes
    if short <= 0:
        return []
    candidates = []
    if budget.chunk_governs and (tokens := largest_chunk_within(points, chunk, headroom_bytes - margin_bytes, align)):
        peak = need_at(points, tokens)
        candidates.append(
            Candidate({"--max-prefill-length": tokens}, peak, headroom_bytes - peak, "a smaller chunk needs less")
        )
    if budget.ratio_governs and budget.memory_ratio and budget.free_before_load_bytes > 0:
        exact = budget.memory_ratio - short / budget.free_before_load_bytes
        ratio = math.floor(round(exact * 100, 6)) / 100
        if ratio >= lowest_ratio and ratio > 0:
            freed = int((budget.memory_ratio - ratio) * budget.free_before_load_bytes)
            candidates.append(
                Candidate(
                    {"--memory-ratio": ratio}, need, headroom_bytes + freed - need, "smaller pools leave more headroom"
                )
            )
    for pool in budget.pools:
        units = -(-short // pool.unit_bytes)
        value = (pool.value - units) // pool.step * pool.step
        if value >= pool.floor:
            freed = (pool.value - value) * pool.unit_bytes
            candidates.append(
                Candidate({pool.flag: value}, need, headroom_bytes + freed - need, f"its size was given: {pool.value}")
            )
    return candidates


def largest_chunk_within(points: Sequence[Point], chunk: int, available_bytes: int, align: int) -> int:
    """The largest aligned chunk below ``chunk`` whose need is at most ``available_bytes``; 0 if there is none.

    The need never falls with tokens, so a bisection finds it.
    """
    low, high = 0, (chunk - 1) // align
    while low < high:
        middle = (low + high + 1) // 2
        if need_at(points, middle * align) <= available_bytes:
            low = middle
        else:
            high = middle - 1
    return low * align
