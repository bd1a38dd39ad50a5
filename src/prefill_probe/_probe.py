"""The probe: shapes -> runs -> need -> verdict -> advice -> record."""

from __future__ import annotations

import datetime
import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefill_probe import advice as advising
from prefill_probe import record as records
from prefill_probe.engine import Engine, Geometry, PlanRefused
from prefill_probe.faults import Fault, classify
from prefill_probe.meter import Measured, Reading
from prefill_probe.settings import ProbeSettings
from prefill_probe.shape import Limits, Shape, capped_by, fill_chunk, full_chunk, largest_power_of_two_below

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One run of one shape. ``fault`` is None when it came back."""

    shape: Shape
    cold: bool
    measured: Measured
    fault: Fault | None
    site: str = ""

    @property
    def ok(self) -> bool:
        """Whether the chunk came back."""
        return self.fault is None


def probe(engine: Engine, settings: ProbeSettings, progress: Progress = lambda text: None) -> records.ProbeRecord:
    """Run a full prefill chunk through ``engine`` and say whether it fits.

    The chunk is run cold (what this boot meets: kernels compile, modules load) and warm (what requests will use). If
    it runs out of memory, halves are run until one fits, and then the full chunk again: by then every kernel is
    loaded, and scratch memory that only a first run takes is gone. The engine is as before when this returns.

    Args:
        engine: idle, after graph capture. Under tensor parallelism every rank calls this with its own engine.
        settings: margin and the rest. ``mode`` is the caller's business: this never raises for a verdict.
        progress: called with one line before each run.

    Raises:
        whatever the engine raises outside of a run, or an interrupt during one; the engine is settled first.
    """
    started = time.monotonic()
    try:
        boot_peak = engine.meter.highest()
        before = engine.meter.read()
        limits = engine.limits()
        session = _Session(engine, settings, progress)
        _run_shapes(session, limits)
        idle = engine.meter.read() if session.device_usable else before
    finally:
        engine.settle()
    return _record(session, limits, before, idle, boot_peak, time.monotonic() - started)


class _Session:
    """The runs of one probe, and whether more can follow."""

    def __init__(self, engine: Engine, settings: ProbeSettings, progress: Progress) -> None:
        self.engine = engine
        self.settings = settings
        self.progress = progress
        self.runs: list[Run] = []
        self.device_usable = True
        # The worst outcome over ranks, which decides what every rank does next.
        self.collective_ok = True

    def run(self, shape: Shape, *, cold: bool) -> Run:
        """Run ``shape``; a memory shortage or another fault is in the result, not raised."""
        self.progress(f"{'cold' if cold else 'warm'} run of {shape.new_tokens} tokens")
        idle = self.engine.meter.read()
        fault, site, issued = None, "", shape
        measured = Measured()
        try:
            with self.engine.meter.measure(idle) as measured:
                issued = self.engine.run(shape)
        except Exception as error:
            site = self.engine.site(error)
            fault = classify(error, free_bytes=idle.free_bytes, total_bytes=idle.total_bytes)
            # The traceback's frames hold the chunk's tensors: let go of them before the next run.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            del error
        gc.collect()
        run = Run(issued, cold, measured, fault, site)
        self.runs.append(run)
        outcomes = self.engine.gather((run.ok, fault is None or fault.retryable))
        self.collective_ok = all(ok for ok, _ in outcomes)
        self.device_usable = self.device_usable and all(usable for _, usable in outcomes)
        return run


def _run_shapes(session: _Session, limits: Limits) -> None:
    """Every run of the probe, in order."""
    full = full_chunk(limits)
    first = session.run(full, cold=True)
    if session.collective_ok:
        full = first.shape
        session.run(full, cold=False)
        if session.collective_ok:
            _run_half(session, limits, full.new_tokens)
        return
    tokens = full.new_tokens
    while session.device_usable and tokens > limits.align:
        tokens = max(limits.align, largest_power_of_two_below(tokens))
        shape = fill_chunk(limits, tokens, f"{tokens} tokens")
        session.run(shape, cold=True)
        if session.collective_ok:
            session.run(shape, cold=False)
            _run_half(session, limits, tokens)
            break
    if session.device_usable and any(run.ok for run in session.runs):
        session.run(full, cold=False)


def _run_half(session: _Session, limits: Limits, tokens: int) -> None:
    """The second point of the slope: half the chunk, warm."""
    half = tokens // 2
    if half < limits.align or not session.collective_ok:
        return
    shape = fill_chunk(limits, half, f"{half} tokens")
    session.run(shape, cold=True)
    if session.collective_ok:
        session.run(shape, cold=False)


def _record(
    session: _Session,
    limits: Limits,
    before: Reading,
    idle: Reading,
    boot_peak: object,
    seconds: float,
) -> records.ProbeRecord:
    engine, settings = session.engine, session.settings
    identity, budget = engine.identity(), engine.budget()
    full_runs = [run for run in session.runs if run.shape.name == session.runs[0].shape.name]
    last = full_runs[-1]
    effective = last.shape.new_tokens
    points = _points(session.runs)
    need = _need(last, points, effective)
    headroom = idle.headroom_bytes
    verdict = _verdict(last, need, headroom, settings.margin_bytes)
    ranks = [
        records.Rank(rank, *values)
        for rank, values in enumerate(
            engine.gather((verdict, headroom, need.device_bytes if need is not None else None))
        )
    ]
    worst = max(ranks, key=lambda rank: _SEVERITY.index(rank.verdict))
    fault = last.fault
    lines = []
    if worst.verdict in ("tight", "does-not-fit") and points:
        lines = _advice(engine, points, effective, headroom, settings.margin_bytes, limits.align, idle)
    return records.ProbeRecord(
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        verdict=worst.verdict,
        device="cuda",
        engine=identity.engine,
        model=identity.model,
        gpu=identity.gpu,
        flags=identity.flags,
        versions=identity.versions,
        chunk=records.Chunk(limits.requested_chunk, effective, capped_by(limits, effective)),
        memory=records.Memory(
            free_before_load_bytes=budget.free_before_load_bytes,
            free_after_graphs_bytes=before.free_bytes,
            headroom_bytes=headroom,
            margin_bytes=settings.margin_bytes,
            total_bytes=idle.total_bytes,
            warmed_bytes=before.headroom_bytes - headroom,
            boot_peak=_ledgers(boot_peak),
        ),
        need=need,
        shapes=[_shape_run(run) for run in session.runs],
        advice=lines,
        fault=None
        if fault is None
        else records.FaultEntry(fault.kind, fault.retryable, fault.chunk_helps, fault.ratio_helps, fault.text),
        ranks=ranks,
        timings={"probe_seconds": round(seconds, 3)},
    )


# From the best to the worst.
_SEVERITY = ("fits", "tight", "inconclusive", "does-not-fit", "fault")


def _verdict(last: Run, need: records.Need | None, headroom: int, margin: int) -> str:
    """The verdict of this rank, by the last run of the full chunk."""
    if last.ok and need is not None:
        return "fits" if headroom - need.device_bytes >= margin else "tight"
    return "does-not-fit" if last.fault is not None and last.fault.is_memory else "fault"


def _ledgers(peak: object) -> records.Ledgers:
    return records.Ledgers(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)  # type: ignore[attr-defined]


def _points(runs: Sequence[Run]) -> dict[str, list[advising.Point]]:
    """Measured points by ledger, from the last run of each size that came back (warm where there was one)."""
    latest = {run.shape.new_tokens: run.measured.peak for run in runs if run.ok}
    return {
        ledger: [advising.Point(tokens, getattr(peak, ledger)) for tokens, peak in latest.items()]
        for ledger in ("allocated_bytes", "reserved_bytes", "device_bytes")
        if latest
    }


def _need(last: Run, points: dict[str, list[advising.Point]], tokens: int) -> records.Need | None:
    """The full chunk's transient: as run, or extrapolated from the sizes that came back; None if none did."""
    if last.ok:
        peak = last.measured.peak
        return records.Need(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes, last.shape.name)
    if not points:
        return None
    estimate = {ledger: advising.need_at(known, tokens) for ledger, known in points.items()}
    return records.Need(**estimate, shape=last.shape.name, estimated=True)


def _shape_run(run: Run) -> records.ShapeRun:
    outcome, oom = "ok", None
    if run.fault is not None:
        outcome = "oom" if run.fault.is_memory else "fault"
        oom = records.Oom(run.fault.requested_bytes, run.fault.free_bytes, run.site)
    seconds = run.measured.seconds
    return records.ShapeRun(
        name=run.shape.name,
        sequences=len(run.shape.sequences),
        new_tokens=run.shape.new_tokens,
        cached_tokens=run.shape.cached_tokens,
        run="cold" if run.cold else "warm",
        outcome=outcome,
        peak=_ledgers(run.measured.peak),
        seconds=round(seconds, 4),
        tokens_per_second=round(run.shape.new_tokens / seconds, 1) if run.ok and seconds > 0 else None,
        oom=oom,
    )


def _advice(
    engine: Engine,
    points: dict[str, list[advising.Point]],
    chunk: int,
    headroom: int,
    margin: int,
    align: int,
    idle: Reading,
) -> list[records.Advice]:
    """Candidates, with what the engine's planner says about them."""
    budget = engine.budget()
    lines = []
    for candidate in advising.recommend(
        points["device_bytes"],
        chunk=chunk,
        headroom_bytes=headroom,
        margin_bytes=margin,
        budget=budget,
        align=align,
    ):
        cost, reason = "", candidate.reason
        if "--memory-ratio" in candidate.flags and budget.memory_ratio is not None:
            try:
                now = engine.plan(budget.memory_ratio)
                then = engine.plan(float(candidate.flags["--memory-ratio"]))
            except PlanRefused as refusal:
                reason = f"the engine's planner refuses it: {refusal}"
                lines.append(records.Advice(candidate.flags, False, None, None, "", reason))
                continue
            cost = _pool_cost(now, then)
        lines.append(records.Advice(candidate.flags, False, candidate.need_bytes, candidate.leaves_bytes, cost, reason))
    return lines


def _pool_cost(now: Geometry, then: Geometry) -> str:
    parts = [f"KV cache {now.kv_tokens} -> {then.kv_tokens} tokens"]
    if now.expert_slots != then.expert_slots:
        parts.append(f"expert cache {now.expert_slots} -> {then.expert_slots} slots")
    return ", ".join(parts)
