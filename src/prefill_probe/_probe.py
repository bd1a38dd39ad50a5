"""The probe: shapes -> runs -> need -> verdict -> advice -> record."""

from __future__ import annotations

import contextlib
import datetime
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from prefill_probe import record as records
from prefill_probe._advise import Adviser
from prefill_probe._runs import as_recorded, ledgers_of
from prefill_probe._verdict import SEVERITY, Part, part_of
from prefill_probe._walk import Progress, Walk
from prefill_probe.engine import Engine
from prefill_probe.faults import Fault
from prefill_probe.settings import ProbeSettings
from prefill_probe.shape import FAMILIES, PLAIN, capped_by
from prefill_probe.watch import deadline, deadline_seconds, frames_of, late

Keep = Callable[[records.ProbeRecord], None]


def probe(
    engine: Engine,
    settings: ProbeSettings,
    progress: Progress = lambda text: None,
    keep: Keep = lambda record: None,
    once: str = "",
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
        once: word of a shape that is run once, at full size, and nothing else: to confirm what is already known.
        keep: called with the record of a probe that cannot come back, from another thread, before the process is
            ended: a chunk that hangs (status 70), or one that failed on this rank alone while the others wait for it
            inside a collective (status 78 or 70, as the fault asks).

    Raises:
        whatever the engine raises outside of a run, or an interrupt during one; the engine is settled first.
    """
    session = Session(engine, settings, progress, keep)
    seconds = deadline_seconds(settings.timeout_seconds, session.walk.tokens)

    def report() -> None:
        load, text = engine.meter.load(), session.late(seconds)
        progress(
            f"hung: {text}; GPU utilisation {load.utilisation_percent} %, "
            f"power {load.power_watts} W, memory {load.used_bytes} bytes (None: not known)"
        )
        keep(session.timed_out(seconds, text))

    with deadline(seconds, report), _set_aside():
        try:
            session.walk.run_all() if not once else session.walk.run_once(once)
            return session.record()
        finally:
            if session.walk.device_usable:
                engine.settle()


@contextlib.contextmanager
def _set_aside() -> Iterator[None]:
    """While the block runs, the garbage collector searches only what is made in it.

    After a chunk that failed everything it held must go, and an engine that resizes its pools asks for several
    searches as well: one of all objects takes up to a third of a second.
    """
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


class Session:
    """One probe: its walk, and the record of it."""

    def __init__(self, engine: Engine, settings: ProbeSettings, progress: Progress, keep: Keep) -> None:
        self.engine = engine
        self.walk = Walk(engine, settings, progress, lambda: keep(self.left_alone()))
        self._thread = threading.get_ident()

    def record(self) -> records.ProbeRecord:
        """The record, the same on every rank: the worst rank's view, and a row for each."""
        parts = self.engine.gather(part_of(self.walk))
        worst = max(range(len(parts)), key=lambda rank: SEVERITY.index(parts[rank].verdict))
        record = self._build(parts[worst], dict(enumerate(parts)))
        if record.verdict not in ("tight", "does-not-fit"):
            return record
        try:
            adviser = self._adviser(parts[worst])
            advice = adviser.proven() if self._can_try(record) else adviser.calculated()
            record = replace(record, advice=advice, need=self._seen(record.need))
        except Exception as error:  # the planner is another program's; without it the verdict stands
            record = replace(record, notes=[*record.notes, f"no advice: {type(error).__name__}: {error}"])
        return replace(
            record,
            shapes=[*record.shapes, *(replace(as_recorded(run), advised=True) for run in self.walk.trials)],
            timings=self._timings(advised=True),
        )

    def _timings(self, *, advised: bool = False) -> dict[str, float]:
        now = time.monotonic()
        timings = {"probe_seconds": round(now - self.walk.started, 3)}
        if advised and self.walk.out_of_memory_at is not None:
            timings["oom_to_advice_seconds"] = round(now - self.walk.out_of_memory_at, 3)
        return timings

    def _seen(self, need: records.Need | None) -> records.Need | None:
        """The need as a trial with smaller pools showed it, where a start's own pools left no room to."""
        full = [run for run in self.walk.trials if run.ok and run.full]
        if (need is not None and not need.estimated) or not full:
            return need
        peak = full[-1].measured.peak
        return records.Need(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes, full[-1].shape.name)

    def _can_try(self, record: records.ProbeRecord) -> bool:
        """Whether advice is run: not where the start goes on as it is, nor where running out of memory does harm."""
        return record.verdict == "does-not-fit" and self.walk.device_usable and not (self.walk.wsl or self.walk.unified)

    def _adviser(self, part: Part) -> Adviser:
        family = next(each for each in FAMILIES if each.word == part.word)
        rates = [run.new_tokens / run.seconds for run in part.shapes if run.outcome == "ok" and run.seconds > 0]
        return Adviser(
            engine=self.engine,
            points=part.points,
            chunk_tokens=self.walk.tokens,
            headroom_bytes=part.headroom_bytes,
            margin_bytes=self.walk.margin,
            align=self.walk.limits.align,
            seconds=3 * self.walk.tokens / max(rates) if rates else 0.0,
            run=lambda tokens: self.walk.trial(family, tokens),
        )

    def late(self, seconds: float) -> str:
        """What is said of a probe that hangs: asked from another thread."""
        frames = frames_of(self._thread)
        return late(seconds, self.engine.place(frames)[1], frames)

    def timed_out(self, seconds: float, text: str) -> records.ProbeRecord:
        """The record of a probe that hangs; asks nothing of the device or of other ranks."""
        fault = Fault("time-out", False, False, False, text)
        shapes = tuple(as_recorded(run) for run in self.walk.runs)
        hung = records.ShapeRun(
            name=PLAIN.name,
            sequences=1,
            new_tokens=self.walk.tokens,
            cached_tokens=0,
            run="warm" if self.walk.full_runs() else "cold",
            outcome="timeout",
            peak=records.Ledgers(0, 0, 0),
            seconds=round(seconds, 1),
        )
        part = Part(
            "fault", self.walk.idle.headroom_bytes, None, (*shapes, hung), (), PLAIN.word, fault, tuple(self.walk.notes)
        )
        return self._build(part, {self.engine.rank: part})

    def left_alone(self) -> records.ProbeRecord:
        """The record of this rank's failure, when the others cannot be asked."""
        part = part_of(self.walk)
        note = f"rank {self.engine.rank} failed while the others wait for it in the forward; nothing smaller was run"
        return self._build(replace(part, notes=(*part.notes, note)), {self.engine.rank: part})

    def _build(self, part: Part, parts: Mapping[int, Part]) -> records.ProbeRecord:
        budget = self.engine.budget()
        fault = part.fault
        effective = self.walk.tokens
        return records.ProbeRecord(
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            verdict=part.verdict,
            device="cuda",
            engine=self.walk.identity.engine,
            model=self.walk.identity.model,
            gpu=self.walk.identity.gpu,
            flags=self.walk.identity.flags,
            versions=self.walk.identity.versions,
            chunk=records.Chunk(self.walk.limits.requested_chunk, effective, capped_by(self.walk.limits, effective)),
            memory=records.Memory(
                free_before_load_bytes=budget.free_before_load_bytes,
                free_after_graphs_bytes=self.walk.before.free_bytes,
                headroom_bytes=part.headroom_bytes,
                margin_bytes=self.walk.margin,
                total_bytes=self.walk.before.total_bytes,
                warmed_bytes=self.walk.before.free_bytes - self.walk.idle.free_bytes,
                boot_peak=ledgers_of(self.walk.boot_peak),
                held=part.held,
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
            timings=self._timings(),
        )

    def _neighbours(self) -> list[records.Neighbour] | None:
        found = self.engine.meter.neighbours()
        if not found.known:
            return None
        return [records.Neighbour(pid, size) for pid, size in sorted(found.bytes_by_pid.items())]
