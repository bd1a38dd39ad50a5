"""Advice that is run: what ``advice`` calculates is tried on the engine, and only then recommended.

Everything here asks the engine through two callbacks, so the search itself can be tested against any need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prefill_probe.advice import Point, largest_chunk_within, need_at
from prefill_probe.engine import Budget, Geometry, NotResizable, PlanRefused

# Chunk runs that one search may take, and how many of them go where the points say, before what is left is halved.
MOST_RUNS = 8
_PREDICTED_RUNS = 3
# An advised chunk is timid if one larger by this many tokens, or by a tenth, would have left the margin.
_CLEAR_STEP = 256
# Steps of a ratio, as it is printed.
RATIO_STEP = 0.01

Flags = Mapping[str, int | float]


@dataclass(frozen=True)
class Trial:
    """One chunk that was run, with the pools as they were then.

    Attributes:
        tokens: of the chunk.
        need_bytes: its transient on the device; None where it did not come back.
        leaves_bytes: headroom less need, of the worst rank; negative where it did not come back.
        seconds: it took.
    """

    tokens: int
    need_bytes: int | None
    leaves_bytes: int
    seconds: float


@dataclass(frozen=True)
class Proven:
    """Flag values under which a chunk was run and left the margin, and the pools that they give."""

    flags: dict[str, int | float]
    trial: Trial
    pools: Geometry | None = None


def largest_chunk(
    run: Callable[[int], Trial],
    points: Sequence[Point],
    *,
    chunk: int,
    headroom_bytes: int,
    margin_bytes: int,
    align: int,
    seconds: float = math.inf,
) -> Trial | None:
    """The largest aligned chunk below ``chunk`` that was run and left the margin; None if none did.

    The first try is where the measured points say that the margin is just left; each run adds a point. It ends when
    the next larger step was run and did not leave the margin, or is predicted not to and no clear step more (256
    tokens or a tenth) does, after ``MOST_RUNS`` runs, or when they took longer than ``seconds`` together.

    Args:
        run: runs the worst shape at so many tokens.
        points: measured before.
        chunk: tokens of the full chunk, which does not leave the margin.
        headroom_bytes: with the pools as they are.
        margin_bytes: what must remain.
        align: tokens; the resolution of the answer.
        seconds: that all runs together may take; at least one is made.
    """
    known = list(points)
    # In units of align: low leaves the margin, high does not.
    low, high = 0, -(-chunk // align)
    high = min([high, *(each.tokens // align for each in points if headroom_bytes - each.need_bytes < margin_bytes)])
    best: Trial | None = None
    spent = 0.0
    for run_number in range(1, MOST_RUNS + 1):
        if high - low <= 1 or spent > seconds:
            break
        units = (largest_chunk_within(known, chunk, headroom_bytes - margin_bytes, align) if known else 0) // align
        if best is not None and units <= low:
            # Points are whole segments, so a prediction may be a little low: a clear step more is run, not predicted.
            step = max(_CLEAR_STEP, best.tokens // 10) // align
            if low + step >= high:
                break
            units = low + step
        elif run_number > _PREDICTED_RUNS and all(each.tokens <= low * align for each in known):
            # Points with a large fixed part creep up, as long as none lies beyond.
            units = max(units, min((low + high) // 2, low * 3 // 2))
        if not low < units < high:
            # The points mislead: a size that they allow did not come back, or they rule out every size.
            units = (low + high) // 2
        trial = run(units * align)
        spent += trial.seconds
        if trial.leaves_bytes >= margin_bytes:
            low, best = units, trial
        else:
            high = units
        if trial.need_bytes is not None:
            known.append(Point(trial.tokens, trial.need_bytes))
    return best


def highest_ratio(
    run: Callable[[Flags, int], tuple[Trial, Geometry]],
    points: Sequence[Point],
    *,
    tokens: int,
    headroom_bytes: int,
    margin_bytes: int,
    budget: Budget,
) -> Proven:
    """The highest memory ratio, in steps of 0.01, at which a chunk of ``tokens`` was run and left the margin.

    The first try is what the points and the planner's share of memory say; the next go by what the last one left,
    down if that was less than the margin, up once if it was more than a step too much.

    Args:
        run: gives the pools the size of these flags and runs the worst shape at so many tokens.
        points: measured, at any pool size.
        tokens: of the chunk.
        headroom_bytes: with the pools as they are under ``budget.memory_ratio``.
        margin_bytes: what must remain.
        budget: how memory was planned.

    Raises:
        NotResizable: nothing can be tried.
        PlanRefused: no ratio does; the text says why.
    """
    if not budget.ratio_governs or budget.memory_ratio is None or budget.free_before_load_bytes <= 0:
        raise PlanRefused("a ratio changes nothing: all pools have explicit sizes")
    share = RATIO_STEP * budget.free_before_load_bytes
    short = need_at(points, tokens) + margin_bytes - headroom_bytes
    # In steps: too little is left from ``high`` on, the planner refuses up to ``low``.
    low, high = 0, math.ceil(round(budget.memory_ratio / RATIO_STEP, 6))
    steps = math.floor(round(budget.memory_ratio / RATIO_STEP, 6)) - max(1, math.ceil(short / share))
    best: Proven | None = None
    refusal = "the planner's floors leave no room"
    failures = 0
    for _ in range(MOST_RUNS):
        if high - low <= 1:
            break
        steps = min(max(steps, low + 1), high - 1)
        flags = {"--memory-ratio": round(steps * RATIO_STEP, 2)}
        try:
            trial, pools = run(flags, tokens)
        except NotResizable:
            raise
        except PlanRefused as refused:
            refusal = f"the engine refuses {flags['--memory-ratio']}: {refused}"
            low, steps = steps, (steps + high) // 2
            continue
        spare = trial.leaves_bytes - margin_bytes
        if spare >= 0:
            best, low = Proven(flags, trial, pools), steps
            if spare < share:
                break
            steps += math.floor(spare / share)
        else:
            high = steps
            # A chunk that did not come back does not say how much it lacked.
            failures += 1
            steps -= max(math.ceil(-spare / share), 1 if trial.need_bytes is not None else 2 ** (failures - 1))
    if best is None:
        raise PlanRefused(refusal)
    return best
