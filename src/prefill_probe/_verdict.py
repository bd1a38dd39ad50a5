"""The verdict: what the runs of a walk say of the full chunk."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_probe import advice as advising
from prefill_probe import record as records
from prefill_probe._runs import Run, as_recorded, points_of
from prefill_probe._walk import DISTURBANCE_BYTES, Walk
from prefill_probe.faults import Fault
from prefill_probe.shape import PLAIN
from prefill_probe.sizes import mib

# On a machine that pages instead of failing, a chunk this many times slower than smaller ones predict is paging.
PAGING_FACTOR = 3.0
# From the best to the worst.
SEVERITY = ("fits", "tight", "inconclusive", "does-not-fit", "fault")


@dataclass(frozen=True)
class Part:
    """One rank's part of the verdict, as the ranks exchange it."""

    verdict: str
    headroom_bytes: int
    need: records.Need | None
    shapes: tuple[records.ShapeRun, ...]
    points: tuple[advising.Point, ...]
    word: str
    fault: Fault | None
    notes: tuple[str, ...]
    held: records.Held | None = None


def _judged(walk: Walk) -> Run | None:
    """The run that the verdict is about: one that failed last, else the one with the largest transient."""
    last = walk.last_full_runs()
    if failed := [run for run in last if not run.ok]:
        return failed[-1]
    return max(last, key=lambda run: run.measured.peak.device_bytes, default=None)


def part_of(walk: Walk) -> Part:
    """This rank's part."""
    judged = _judged(walk)
    headroom = walk.idle.headroom_bytes
    need = _need(walk, judged)
    fault = judged.fault if judged is not None else next((run.fault for run in walk.runs if run.fault), None)
    notes = list(walk.notes)
    if walk.moved is not None and abs(walk.moved) > DISTURBANCE_BYTES:
        verdict = "inconclusive"
        notes.append(f"free memory moved by {mib(walk.moved)} under the probe, twice, and not by this process")
    elif fault is not None:
        verdict = "does-not-fit" if fault.is_memory else "fault"
    elif walk.stopped_early:
        verdict = "does-not-fit"
        notes.append("the full chunk was not run: running out of memory does harm on this machine")
    elif judged is None or need is None:
        verdict = "fits"  # as far as this rank knows: it stopped because another one failed, whose part is worse
    else:
        verdict = "fits" if headroom - need.device_bytes >= walk.margin else "tight"
        if _pages(walk, judged):
            verdict = "tight"
            notes.append("oversubscribed: the full chunk is far slower than smaller ones predict")
    shapes = tuple(as_recorded(run) for run in walk.runs)
    word = judged.family.word if judged else PLAIN.word
    slope = _slope(walk, judged, need)
    return Part(verdict, headroom, need, shapes, slope, word, fault, tuple(notes), _held(walk, headroom))


def _held(walk: Walk, headroom: int) -> records.Held | None:
    """The engine's holdings, and what remains of the memory that was free before loading."""
    if not walk.holdings:
        return None
    parts = {f"{name}_bytes": size for name, size in walk.holdings.items()}
    rest = walk.engine.budget().free_before_load_bytes - headroom - sum(parts.values())
    return records.Held(**parts, other_bytes=max(0, rest))


def _slope(walk: Walk, judged: Run | None, need: records.Need | None) -> tuple[advising.Point, ...]:
    """Device transients by size of the shape that is judged.

    Where it was run at one size only: those of the full chunk, and what it needs more than that, which is kept at
    every size (a depth or a number of sequences does not shrink with the chunk).
    """
    own = points_of(walk.runs, judged.family if judged else PLAIN).get("device_bytes", [])
    plain = points_of(walk.runs, PLAIN).get("device_bytes", [])
    if need is None or len(own) > 1 or not plain:
        return tuple(own)
    more = max(0, need.device_bytes - advising.need_at(plain, walk.tokens))
    return tuple(advising.Point(point.tokens, point.need_bytes + more) for point in plain)


def _pages(walk: Walk, last: Run) -> bool:
    """Whether the full chunk took much longer than smaller ones predict, where memory is paged silently."""
    if not (walk.wsl or walk.unified):
        return False
    smaller = [run for run in walk.runs if run.ok and run.shape.new_tokens < last.shape.new_tokens]
    if not smaller or last.cold:
        return False
    best = max(run.shape.new_tokens / run.measured.seconds for run in smaller if run.measured.seconds > 0)
    return last.measured.seconds > PAGING_FACTOR * last.shape.new_tokens / best


def _need(walk: Walk, judged: Run | None) -> records.Need | None:
    """What full chunks take: of each ledger the most of any shape, which need not be the shape that is judged.

    Where that did not come back, extrapolated from its smaller sizes; None if none did.
    """
    if judged is not None and judged.ok:
        peaks = [run.measured.peak for run in walk.last_full_runs()]
        return records.Need(
            max(peak.allocated_bytes for peak in peaks),
            max(peak.reserved_bytes for peak in peaks),
            max(peak.device_bytes for peak in peaks),
            judged.shape.name,
        )
    family = PLAIN if judged is None else judged.family
    points = points_of(walk.runs, family)
    if not points:
        return None
    estimate = {ledger: advising.need_at(known, walk.tokens) for ledger, known in points.items()}
    return records.Need(**estimate, shape=family.name, estimated=True)
