"""One run of one shape, as the walk makes it and as the record has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_probe import record as records
from prefill_probe.advice import Point
from prefill_probe.composition import Composition, Timeline
from prefill_probe.engine import Routing
from prefill_probe.faults import Fault
from prefill_probe.meter import Measured, Peak
from prefill_probe.shape import Family, Shape


@dataclass(frozen=True)
class Observed:
    """What a run that was watched closely showed."""

    made_of: Composition | None
    routing: Routing | None
    timeline: Timeline | None


@dataclass(frozen=True)
class Run:
    """One run of one shape. ``fault`` is None when it came back."""

    family: Family
    full: bool
    shape: Shape
    cold: bool
    fresh: bool
    measured: Measured
    fault: Fault | None
    site: str = ""
    observed: Observed | None = None

    @property
    def ok(self) -> bool:
        """Whether the chunk came back."""
        return self.fault is None


def points_of(runs: Sequence[Run], family: Family) -> dict[str, list[Point]]:
    """Measured points by ledger, from the last run of each size that came back (warm where there was one).

    Only of runs before which unused memory was handed back: in the others what earlier runs held is counted as well.
    """
    latest = {run.shape.new_tokens: run.measured.peak for run in runs if run.ok and run.family is family and run.fresh}
    return {
        ledger: [Point(tokens, getattr(peak, ledger)) for tokens, peak in latest.items()]
        for ledger in ("allocated_bytes", "reserved_bytes", "device_bytes")
        if latest
    }


def ledgers_of(peak: Peak) -> records.Ledgers:
    """A transient, as the record has it."""
    return records.Ledgers(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)


def as_recorded(run: Run) -> records.ShapeRun:
    """Its entry of the record."""
    outcome, oom = "ok", None
    if run.fault is not None:
        outcome = "oom" if run.fault.is_memory else "fault"
        oom = records.Oom(run.fault.requested_bytes, run.fault.free_bytes, run.site)
    seconds = run.measured.seconds
    return records.ShapeRun(
        name=run.shape.name if run.fresh else f"{run.shape.name}, nothing handed back before",
        sequences=len(run.shape.sequences),
        new_tokens=run.shape.new_tokens,
        cached_tokens=run.shape.cached_tokens,
        run="cold" if run.cold else "warm",
        outcome=outcome,
        peak=ledgers_of(run.measured.peak),
        seconds=round(seconds, 4),
        tokens_per_second=round(run.shape.new_tokens / seconds, 1) if run.ok and seconds > 0 else None,
        oom=oom,
        made_of=_made_of(run),
        routing=_routing(run),
        timeline=_timeline(run),
    )


def _made_of(run: Run) -> records.MadeOf | None:
    made = run.observed.made_of if run.observed else None
    return None if made is None else records.MadeOf(made.components, made.largest_bytes, made.largest_site)


def _routing(run: Run) -> records.Routing | None:
    seen = run.observed.routing if run.observed else None
    return None if seen is None else records.Routing(seen.experts, list(seen.distinct), list(seen.largest_load))


def _timeline(run: Run) -> records.Timeline | None:
    seen = run.observed.timeline if run.observed else None
    if seen is None:
        return None
    return records.Timeline(list(seen.layers), {name: list(sizes) for name, sizes in seen.components.items()})
