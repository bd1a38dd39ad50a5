"""The probe: shapes -> runs -> need -> verdict -> advice -> record."""

from __future__ import annotations

import datetime
import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefill_probe import advice as advising
from prefill_probe import record as records
from prefill_probe.engine import Engine, Geometry, PlanRefused
from prefill_probe.faults import EX_CONFIG, EX_SOFTWARE, Fault, classify
from prefill_probe.meter import Measured, Peak
from prefill_probe.neighbours import moved_bytes
from prefill_probe.settings import ProbeSettings, margin_for
from prefill_probe.shape import Limits, Shape, capped_by, fill_chunk, full_chunk, largest_power_of_two_below
from prefill_probe.sizes import MIB, mib
from prefill_probe.watch import bounded, deadline, deadline_seconds

Progress = Callable[[str], None]
Keep = Callable[[records.ProbeRecord], None]

# Free memory that moved by more than this, and not by this process, disturbs a measurement.
DISTURBANCE_BYTES = 32 * MIB
# How long a rank whose chunk failed waits for the others. They may be inside a collective of the same forward, where
# this rank will never come, and nothing but the end of their processes frees them.
PATIENCE_SECONDS = 3.0
# On a machine that pages instead of failing, a chunk this many times slower than smaller ones predict is paging.
PAGING_FACTOR = 3.0


def probe(
    engine: Engine,
    settings: ProbeSettings,
    progress: Progress = lambda text: None,
    keep: Keep = lambda record: None,
) -> records.ProbeRecord:
    """Run a full prefill chunk through ``engine`` and say whether it fits.

    The chunk is run cold (what this boot meets: kernels compile, modules load) and warm (what requests will use). If
    it runs out of memory, halves are run until one fits, and then the full chunk again: by then every kernel is
    loaded, and scratch memory that only a first run takes is gone. Where running out does harm (WSL2, unified
    memory) chunks grow from small to large instead, and a chunk that is predicted not to fit is not run. The engine
    is as before when this returns.

    Args:
        engine: idle, after graph capture. Under tensor parallelism every rank calls this with its own engine, and
            all get the same verdict.
        settings: margin, timeout and the rest. ``mode`` is the caller's: this never raises for a verdict.
        progress: called with one line before each run.
        keep: called with the record of a probe that cannot come back, from another thread, before the process is
            ended: a chunk that hangs (status 70), or one that failed on this rank alone while the others wait for it
            inside a collective (status 78 or 70, as the fault asks).

    Raises:
        whatever the engine raises outside of a run, or an interrupt during one; the engine is settled first.
    """
    session = Session(engine, settings, progress, keep)
    seconds = deadline_seconds(settings.timeout_seconds, session.full.new_tokens)

    def report() -> None:
        load = engine.meter.load()
        progress(
            f"hung: no result within {seconds:.0f} s; GPU utilisation {load.utilisation_percent} %, "
            f"power {load.power_watts} W, memory {load.used_bytes} bytes (None: not known)"
        )
        keep(session.timed_out(seconds))

    with deadline(seconds, report):
        try:
            session.run_all()
        finally:
            if session.device_usable:
                engine.settle()
    return session.record()


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


@dataclass(frozen=True)
class Part:
    """One rank's part of the verdict, as the ranks exchange it."""

    verdict: str
    headroom_bytes: int
    need: records.Need | None
    shapes: tuple[records.ShapeRun, ...]
    fault: Fault | None
    notes: tuple[str, ...]


# From the best to the worst.
_SEVERITY = ("fits", "tight", "inconclusive", "does-not-fit", "fault")


class Session:
    """The runs of one probe and what follows from them."""

    def __init__(self, engine: Engine, settings: ProbeSettings, progress: Progress, keep: Keep) -> None:
        self.engine = engine
        self.progress = progress
        self.keep = keep
        self.started = time.monotonic()
        self.identity = engine.identity()
        self.limits: Limits = engine.limits()
        self.full: Shape = full_chunk(self.limits)
        gpu = self.identity.gpu
        self.wsl, self.unified = bool(gpu.get("wsl")), bool(gpu.get("unified"))
        self.margin, why = margin_for(settings, wsl=self.wsl, unified=self.unified)
        self.notes: list[str] = [f"margin {mib(self.margin)}: {why}"] if why else []
        self.boot_peak = engine.meter.highest()
        self.before = engine.meter.read()
        self.idle = self.before
        self.runs: list[Run] = []
        self.moved: int | None = None
        self.stopped_early = False
        self.device_usable = True
        # Whether the last run came back on every rank: what they do next depends on it, and must not differ.
        self.all_ok = True

    # Running ---------------------------------------------------------------------------------------------------

    def run_all(self) -> None:
        """Every run of the probe; once more if a neighbour disturbed it."""
        for attempt in ("first", "repeated"):
            before = self.engine.meter.neighbours()
            start = len(self.runs)
            if self.wsl or self.unified:
                self._from_small_to_large()
            else:
                self._from_large_to_small()
            if not self.device_usable:
                return
            self.idle = self.engine.meter.read()
            self.moved = self._moved(moved_bytes(before, self.engine.meter.neighbours()), self.runs[start:])
            if not any(self.engine.gather(abs(self.moved) > DISTURBANCE_BYTES)):
                return
            if attempt == "first":
                self.progress(f"free memory moved by {mib(self.moved)} under the probe; repeating it")

    def _moved(self, by_neighbours: int | None, runs: Sequence[Run]) -> int:
        """Bytes by which others changed what they hold during ``runs``.

        Where NVML cannot say: what changed outside the allocator over the last warm run, when this process has
        nothing left to load.
        """
        if by_neighbours is not None:
            return by_neighbours
        warm = [run for run in runs if run.ok and not run.cold]
        return warm[-1].measured.peak.device_bytes - warm[-1].measured.peak.reserved_bytes if warm else 0

    def _from_large_to_small(self) -> None:
        self.full = self.run(self.full, cold=True).shape
        if self.all_ok:
            self.run(self.full, cold=False)
            self._run_half(self.full.new_tokens)
            return
        tokens = self.full.new_tokens
        while self.device_usable and tokens > self.limits.align:
            tokens = max(self.limits.align, largest_power_of_two_below(tokens))
            self._run_twice(tokens)
            if self.all_ok:
                self._run_half(tokens)
                break
        if self.device_usable and self.all_ok:
            self.run(self.full, cold=False)

    def _from_small_to_large(self) -> None:
        tokens = max(self.limits.align, 1 << max(0, (self.full.new_tokens // 8).bit_length() - 1))
        while tokens < self.full.new_tokens:
            self._run_twice(tokens)
            if not self.all_ok or not self._safe(2 * tokens):
                return
            tokens *= 2
        self.full = self.run(self.full, cold=True).shape
        if self.all_ok:
            self.run(self.full, cold=False)

    def _safe(self, tokens: int) -> bool:
        """Whether a chunk of ``tokens`` is predicted to stay clear of what does harm, on every rank."""
        target = min(tokens, self.full.new_tokens)
        reserve = self.margin if self.unified else 0
        need = advising.need_at(_points(self.runs)["device_bytes"], target)
        safe = all(self.engine.gather(need + reserve <= self.before.headroom_bytes))
        self.stopped_early = not safe
        return safe

    def _run_twice(self, tokens: int) -> None:
        """Cold, and if that comes back, warm: a prediction from what only a first run takes would be far too high."""
        shape = fill_chunk(self.limits, tokens, f"{tokens} tokens")
        self.run(shape, cold=True)
        if self.all_ok:
            self.run(shape, cold=False)

    def _run_half(self, tokens: int) -> None:
        """The second point of the slope."""
        if tokens // 2 >= self.limits.align and self.all_ok:
            self._run_twice(tokens // 2)

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
            site, issued = self.engine.site(error), self.engine.issued(shape)
            fault = classify(error, free_bytes=measured.free_bytes, total_bytes=idle.total_bytes, wsl=self.wsl)
            # The frames of the traceback hold the chunk's tensors: let go of them before the next run.
            _forget_frames(error)
        if fault is not None:
            gc.collect()
        run = Run(issued, cold, measured, fault, site)
        self.runs.append(run)
        outcomes = self._outcomes(run)
        self.all_ok = all(ok for ok, _ in outcomes)
        self.device_usable = self.device_usable and all(usable for _, usable in outcomes)
        return run

    def _outcomes(self, run: Run) -> list[tuple[bool, bool]]:
        """Of every rank: whether its run came back, and whether its device can run more."""
        if run.fault is None:
            return self.engine.gather((True, True))

        def report() -> None:
            self.progress(f"the other ranks did not answer within {PATIENCE_SECONDS:.0f} s")
            self.keep(self.left_alone())

        status = EX_CONFIG if run.fault.is_memory else EX_SOFTWARE
        with bounded(PATIENCE_SECONDS, report, status):
            return self.engine.gather((False, run.fault.retryable))

    # What follows ----------------------------------------------------------------------------------------------

    def _full_runs(self) -> list[Run]:
        return [run for run in self.runs if run.shape.name == self.full.name]

    def part(self) -> Part:
        """This rank's part."""
        full = self._full_runs()
        last = full[-1] if full else None
        points = _points(self.runs)
        headroom = self.idle.headroom_bytes
        need = _need(last, points, self.full.new_tokens, self.full.name)
        fault = last.fault if last is not None else next((run.fault for run in self.runs if run.fault), None)
        notes = list(self.notes)
        if self.moved is not None and abs(self.moved) > DISTURBANCE_BYTES:
            verdict = "inconclusive"
            notes.append(f"free memory moved by {mib(self.moved)} under the probe, twice, and not by this process")
        elif fault is not None:
            verdict = "does-not-fit" if fault.is_memory else "fault"
        elif self.stopped_early:
            verdict = "does-not-fit"
            notes.append("the full chunk was not run: running out of memory does harm on this machine")
        elif last is None or need is None:
            verdict = "fits"  # as far as this rank knows: it stopped because another one failed, whose part is worse
        else:
            verdict = "fits" if headroom - need.device_bytes >= self.margin else "tight"
            if self._pages(last):
                verdict = "tight"
                notes.append("oversubscribed: the full chunk is far slower than smaller ones predict")
        shapes = tuple(_shape_run(run) for run in self.runs)
        return Part(verdict, headroom, need, shapes, fault, tuple(notes))

    def _pages(self, last: Run) -> bool:
        """Whether the full chunk took much longer than smaller ones predict, where memory is paged silently."""
        if not (self.wsl or self.unified):
            return False
        smaller = [run for run in self.runs if run.ok and run.shape.new_tokens < last.shape.new_tokens]
        if not smaller or last.cold:
            return False
        best = max(run.shape.new_tokens / run.measured.seconds for run in smaller if run.measured.seconds > 0)
        return last.measured.seconds > PAGING_FACTOR * last.shape.new_tokens / best

    def record(self) -> records.ProbeRecord:
        """The record, the same on every rank: the worst rank's view, and a row for each."""
        parts = self.engine.gather(self.part())
        worst = max(range(len(parts)), key=lambda rank: _SEVERITY.index(parts[rank].verdict))
        record = self._build(parts[worst], dict(enumerate(parts)))
        if record.verdict in ("tight", "does-not-fit"):
            try:
                record = replace(record, advice=self._advice(parts[worst]))
            except Exception as error:  # the planner is another program's; without it the verdict stands
                record = replace(record, notes=[*record.notes, f"no advice: {type(error).__name__}: {error}"])
        return record

    def timed_out(self, seconds: float) -> records.ProbeRecord:
        """The record of a probe that hangs; asks nothing of the device or of other ranks."""
        fault = Fault("time-out", False, False, False, f"no result within {seconds:.0f} s")
        shapes = tuple(_shape_run(run) for run in self.runs)
        hung = records.ShapeRun(
            name=self.full.name,
            sequences=len(self.full.sequences),
            new_tokens=self.full.new_tokens,
            cached_tokens=self.full.cached_tokens,
            run="warm" if self._full_runs() else "cold",
            outcome="timeout",
            peak=records.Ledgers(0, 0, 0),
            seconds=round(seconds, 1),
        )
        part = Part("fault", self.idle.headroom_bytes, None, (*shapes, hung), fault, tuple(self.notes))
        return self._build(part, {self.engine.rank: part})

    def left_alone(self) -> records.ProbeRecord:
        """The record of this rank's failure, when the others cannot be asked."""
        part = self.part()
        note = f"rank {self.engine.rank} failed while the others wait for it in the forward; nothing smaller was run"
        return self._build(replace(part, notes=(*part.notes, note)), {self.engine.rank: part})

    def _build(self, part: Part, parts: Mapping[int, Part]) -> records.ProbeRecord:
        budget = self.engine.budget()
        fault = part.fault
        effective = self.full.new_tokens
        return records.ProbeRecord(
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            verdict=part.verdict,
            device="cuda",
            engine=self.identity.engine,
            model=self.identity.model,
            gpu=self.identity.gpu,
            flags=self.identity.flags,
            versions=self.identity.versions,
            chunk=records.Chunk(self.limits.requested_chunk, effective, capped_by(self.limits, effective)),
            memory=records.Memory(
                free_before_load_bytes=budget.free_before_load_bytes,
                free_after_graphs_bytes=self.before.free_bytes,
                headroom_bytes=part.headroom_bytes,
                margin_bytes=self.margin,
                total_bytes=self.before.total_bytes,
                warmed_bytes=self.before.free_bytes - self.idle.free_bytes,
                boot_peak=_ledgers(self.boot_peak),
            ),
            need=part.need,
            shapes=list(part.shapes),
            advice=[],
            fault=None
            if fault is None
            else records.FaultEntry(fault.kind, fault.retryable, fault.chunk_helps, fault.ratio_helps, fault.text),
            ranks=[
                records.Rank(rank, each.verdict, each.headroom_bytes, each.need.device_bytes if each.need else None)
                for rank, each in sorted(parts.items())
            ],
            neighbours=self._neighbours(),
            notes=list(part.notes),
            timings={"probe_seconds": round(time.monotonic() - self.started, 3)},
        )

    def _neighbours(self) -> list[records.Neighbour] | None:
        found = self.engine.meter.neighbours()
        if not found.known:
            return None
        return [records.Neighbour(pid, size) for pid, size in sorted(found.bytes_by_pid.items())]

    def _advice(self, part: Part) -> list[records.Advice]:
        """Candidates, with what the engine's planner says of them."""
        points = [advising.Point(run.new_tokens, run.peak.device_bytes) for run in part.shapes if run.outcome == "ok"]
        if not points:
            return []
        budget = self.engine.budget()
        lines = []
        for candidate in advising.recommend(
            points,
            chunk=self.full.new_tokens,
            headroom_bytes=part.headroom_bytes,
            margin_bytes=self.margin,
            budget=budget,
            align=self.limits.align,
        ):
            cost = ""
            if "--memory-ratio" in candidate.flags and budget.memory_ratio is not None:
                try:
                    now = self.engine.plan(budget.memory_ratio)
                    then = self.engine.plan(float(candidate.flags["--memory-ratio"]))
                except PlanRefused as refusal:
                    reason = f"the engine's planner refuses it: {refusal}"
                    lines.append(records.Advice(candidate.flags, False, None, None, "", reason))
                    continue
                cost = _pool_cost(now, then)
            lines.append(
                records.Advice(
                    candidate.flags, False, candidate.need_bytes, candidate.leaves_bytes, cost, candidate.reason
                )
            )
        return lines


def _forget_frames(error: BaseException) -> None:
    """Let go of the locals of every frame that ``error`` and the errors behind it passed through."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        each = each.__cause__ or each.__context__


def _ledgers(peak: Peak) -> records.Ledgers:
    return records.Ledgers(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)


def _points(runs: Sequence[Run]) -> dict[str, list[advising.Point]]:
    """Measured points by ledger, from the last run of each size that came back (warm where there was one)."""
    latest = {run.shape.new_tokens: run.measured.peak for run in runs if run.ok}
    return {
        ledger: [advising.Point(tokens, getattr(peak, ledger)) for tokens, peak in latest.items()]
        for ledger in ("allocated_bytes", "reserved_bytes", "device_bytes")
        if latest
    }


def _need(last: Run | None, points: dict[str, list[advising.Point]], tokens: int, name: str) -> records.Need | None:
    """The full chunk's transient: as run, or extrapolated from the sizes that came back; None if none did."""
    if last is not None and last.ok:
        peak = last.measured.peak
        return records.Need(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes, name)
    if not points:
        return None
    estimate = {ledger: advising.need_at(known, tokens) for ledger, known in points.items()}
    return records.Need(**estimate, shape=name, estimated=True)


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


def _pool_cost(now: Geometry, then: Geometry) -> str:
    parts = []
    if now.kv_tokens != then.kv_tokens:
        parts.append(f"KV cache {now.kv_tokens} -> {then.kv_tokens} tokens")
    if now.expert_slots != then.expert_slots:
        parts.append(f"expert cache {now.expert_slots} -> {then.expert_slots} slots")
    return ", ".join(parts)
