"""The probe: shapes -> runs -> need -> verdict -> advice -> record."""

from __future__ import annotations

import contextlib
import datetime
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefill_probe import advice as advising
from prefill_probe import record as records
from prefill_probe._advise import Adviser
from prefill_probe.composition import Composition, Mark, Timeline, blocks_at_peak, compose, timeline
from prefill_probe.engine import Engine, PlanRefused, Routing, ShapeRefused
from prefill_probe.faults import EX_CONFIG, EX_SOFTWARE, Fault, classify
from prefill_probe.guard import sizes_to_measure
from prefill_probe.meter import Measured, Peak
from prefill_probe.neighbours import moved_bytes
from prefill_probe.settings import Mode, ProbeSettings, margin_for
from prefill_probe.shape import (
    FAMILIES,
    PLAIN,
    Family,
    Limits,
    Shape,
    capped_by,
    full_chunk,
    largest_power_of_two_below,
)
from prefill_probe.sizes import MIB, mib
from prefill_probe.trial import Trial
from prefill_probe.watch import bounded, deadline, deadline_seconds

Progress = Callable[[str], None]
Keep = Callable[[records.ProbeRecord], None]

# Free memory that moved by more than this, and not by this process, disturbs a measurement.
DISTURBANCE_BYTES = 32 * MIB
# What the allocator takes from the device at once.
_SEGMENT_BYTES = 2 * MIB
# Turns of a short and a full chunk, while reserved memory grows at each.
_TURNS = 3
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
    seconds = deadline_seconds(settings.timeout_seconds, session.tokens)

    def report() -> None:
        load = engine.meter.load()
        progress(
            f"hung: no result within {seconds:.0f} s; GPU utilisation {load.utilisation_percent} %, "
            f"power {load.power_watts} W, memory {load.used_bytes} bytes (None: not known)"
        )
        keep(session.timed_out(seconds))

    with deadline(seconds, report), _set_aside():
        try:
            session.run_all() if not once else session.run_once(once)
            return session.record()
        finally:
            if session.device_usable:
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


# From the best to the worst.
_SEVERITY = ("fits", "tight", "inconclusive", "does-not-fit", "fault")


class Session:
    """The runs of one probe and what follows from them."""

    def __init__(self, engine: Engine, settings: ProbeSettings, progress: Progress, keep: Keep) -> None:
        self.engine = engine
        self.settings = settings
        self.progress = progress
        self.keep = keep
        self.started = time.monotonic()
        self.identity = engine.identity()
        self.limits: Limits = engine.limits()
        # New tokens of a full chunk.
        self.tokens = full_chunk(self.limits).new_tokens
        self.families = [
            family
            for family in FAMILIES
            if family.word in settings.shapes and family.shape(self.limits, self.tokens, self.tokens) is not None
        ]
        gpu = self.identity.gpu
        self.wsl, self.unified = bool(gpu.get("wsl")), bool(gpu.get("unified"))
        self.margin, why = margin_for(settings, wsl=self.wsl, unified=self.unified)
        self.notes: list[str] = [f"margin {mib(self.margin)}: {why}"] if why else []
        self.boot_peak = engine.meter.boot_peak()
        self.holdings = self._holdings()
        self.before = engine.meter.read()
        self.start = self.idle = self.before
        self.runs: list[Run] = []
        self.trials: list[Run] = []
        self.out_of_memory_at: float | None = None
        self.moved: int | None = None
        self.stopped_early = False
        self.device_usable = True
        # Whether the last run came back on every rank: what they do next depends on it, and must not differ.
        self.all_ok = True
        # New tokens of the largest shape that came back on every rank.
        self.reached = 0

    def _holdings(self) -> dict[str, int]:
        """What the engine holds by component; empty, with a note, where it cannot say: it explains, and no more."""
        try:
            return self.engine.holdings()
        except Exception as error:
            self.notes.append(f"what the engine holds is not known: {type(error).__name__}: {error}")
            return {}

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

    def run_once(self, word: str) -> None:
        """One run of one shape; of the full chunk where that shape cannot be."""
        family = next((each for each in self.families if each.word == word), PLAIN)
        self.run(family, self.tokens, cold=True)
        if self.all_ok:
            self._run_for_guard()
        if self.device_usable:
            self.idle = self.engine.meter.read()

    def _moved(self, by_neighbours: int | None, runs: Sequence[Run]) -> int:
        """Bytes by which others changed what they hold during ``runs``.

        Where NVML cannot say: what changed outside the allocator over the last warm run, when this process has
        nothing left to load.
        """
        if by_neighbours is not None:
            return by_neighbours
        warm = [run for run in runs if run.ok and not run.cold]  # against a reading right before it
        return warm[-1].measured.peak.device_bytes - warm[-1].measured.peak.reserved_bytes if warm else 0

    def _from_large_to_small(self) -> None:
        """Every shape at full size, smaller ones where it does not come back, and the worst shape once more."""
        for family in self.families:
            if not self._comes_back(family):
                if self.settings.mode is not Mode.ENFORCE:  # it may serve all the same
                    self._run_for_guard()
                return
        self._repeat(self._worst())
        if any(self.engine.gather(self._tight())):
            self._run_half(PLAIN, self.tokens)
        self._run_for_guard()

    def _run_for_guard(self) -> None:
        """Every shape at sizes below the largest that came back: what smaller chunks need, for the guard."""
        if not self.settings.guard or not self.device_usable or not self.reached:
            return
        largest = min(self.reached, self.tokens)
        # The deepest chunk holds all that one from empty caches holds, and more.
        deep = any(family.word == "deep" for family in self.families)
        families = [family for family in self.families if not (deep and family is PLAIN)]
        sizes = ([largest] if largest < self.tokens else []) + sizes_to_measure(largest, self.limits.align)
        for tokens in sizes:
            for family in families:
                self.run(family, tokens, cold=True)
                if not self.device_usable:
                    return

    def _comes_back(self, family: Family) -> bool:
        """Run ``family`` at full size; if it fails, ever smaller ones until one comes back, and the full size again.

        By then every kernel is loaded, and scratch memory that only a first run takes is gone.
        """
        self.run(family, self.tokens, cold=True)
        if self.all_ok:
            return True
        tokens = self.tokens
        while self.device_usable and tokens > self.limits.align:
            tokens = max(self.limits.align, largest_power_of_two_below(tokens))
            self._run_twice(family, tokens)
            if self.all_ok:
                self._run_half(family, tokens)
                break
        if self.device_usable and self.all_ok:
            self.run(family, self.tokens, cold=False, observe=True)
        return self.device_usable and self.all_ok

    def _worst(self) -> Family:
        """The shape with the largest transient, on any rank; not the process's very first run if there is another."""
        runs = self._full_runs()
        peaks = {run.family.word: run.measured.peak.device_bytes for run in (runs[1:] or runs)}
        ranks = self.engine.gather(peaks)
        return max((each for each in FAMILIES if each.word in peaks), key=lambda f: max(rank[f.word] for rank in ranks))

    def _repeat(self, family: Family) -> None:
        """A short chunk and ``family`` at full size again, with nothing handed back to the device in between.

        That is how requests meet the allocator. Reserved memory that grows at each turn is fragmentation.
        """
        first = self._full_runs(family)[-1].measured.peak
        reserved = [first.reserved_bytes]
        for _ in range(_TURNS):
            self.run(PLAIN, min(self.limits.align, self.tokens), cold=False, fresh=False)
            if self.all_ok:
                self.run(family, self.tokens, cold=False, fresh=False, observe=True)
            if not self.all_ok:
                return
            again = self.runs[-1].measured.peak
            reserved.append(again.reserved_bytes)
            if not any(self.engine.gather(reserved[-1] - reserved[-2] > DISTURBANCE_BYTES)):
                break
        else:
            self.notes.append("reserved memory grows at each turn (fragmentation): " + ", ".join(map(mib, reserved)))
        # What only the first run took is still held, unused, and was counted again.
        if any(self.engine.gather(first.allocated_bytes - again.allocated_bytes > _SEGMENT_BYTES)):
            self.run(family, self.tokens, cold=False)

    def _from_small_to_large(self) -> None:
        tokens = max(self.limits.align, 1 << max(0, (self.tokens // 8).bit_length() - 1))
        while tokens < self.tokens:
            self._run_twice(PLAIN, tokens)
            if not self.all_ok or not self._safe(2 * tokens):
                return
            tokens *= 2
        for family in self.families:
            self.run(family, self.tokens, cold=True)
            if not self.all_ok or not self._safe(self.tokens):
                return
        self._repeat(self._worst())
        self._run_for_guard()

    def _safe(self, tokens: int) -> bool:
        """Whether a chunk of ``tokens`` is predicted to stay clear of what does harm, on every rank."""
        target = min(tokens, self.tokens)
        reserve = self.margin if self.unified else 0
        need = advising.need_at(_points(self.runs, PLAIN)["device_bytes"], target)
        safe = all(self.engine.gather(need + reserve <= self.before.headroom_bytes))
        self.stopped_early = not safe
        return safe

    def _tight(self) -> bool:
        """Whether the margin is not left, as far as is known: then advice is wanted, which needs a slope."""
        need = max(run.measured.peak.device_bytes for run in self._full_runs())
        return self.engine.meter.read().headroom_bytes - need < self.margin

    def _run_twice(self, family: Family, tokens: int) -> None:
        """Cold, and if that comes back, warm: a prediction from what only a first run takes would be far too high."""
        self.run(family, tokens, cold=True)
        if self.all_ok:
            self.run(family, tokens, cold=False)

    def _run_half(self, family: Family, tokens: int) -> None:
        """The second point of the slope."""
        if tokens // 2 >= self.limits.align and self.all_ok:
            self._run_twice(family, tokens // 2)

    def run(self, family: Family, tokens: int, *, cold: bool, fresh: bool = True, observe: bool = False) -> None:
        """Run ``family`` with ``tokens`` new tokens; what goes wrong is in the run, not raised.

        ``fresh``: what the allocator holds unused is handed back first. ``observe``: what the peak is made of and what
        the routers choose are noted, which makes the run a little slower. Where a family has no shape of that size,
        or the scheduler does not admit it, nothing is run.
        """
        shape = family.shape(self.limits, tokens, self.tokens)
        if shape is None:
            self.all_ok = True
            return
        number = len(self.runs) + len(self.trials) + 1
        # Every shape, and the worst one again after a short chunk; what does not fit takes more.
        least = max(number, len(self.families) + 2)
        kind = "cold" if cold else "warm"
        self.progress(f"{kind} run of {shape.new_tokens} tokens ({shape.name}), {number} of {least} or more")
        self.start = self.engine.meter.read() if fresh else self.engine.meter.reread(self.start)
        fault, site, issued = None, "", shape
        measured = Measured()
        events: list[dict[str, Any]] = []
        routing: list[Routing] = []
        marks: list[Mark] = []
        try:
            with contextlib.ExitStack() as watching:
                if observe:
                    events = watching.enter_context(self.engine.meter.trace())
                    marks = watching.enter_context(self.engine.layers())
                    routing = watching.enter_context(self.engine.observe())
                with self.engine.meter.measure(self.start) as measured:  # what is seen is read when its time is over
                    issued = self.engine.run(shape)
        except ShapeRefused as refusal:
            if family is PLAIN:
                raise
            self.notes.append(f"{shape.name} not run: {refusal}")
            self.all_ok = True
            return
        except Exception as error:
            site, issued = self.engine.site(error), self.engine.issued(shape)
            total = self.start.total_bytes
            fault = classify(error, free_bytes=measured.free_bytes, total_bytes=total, wsl=self.wsl)
            if fault.is_memory and self.out_of_memory_at is None:
                self.out_of_memory_at = time.monotonic()
            # The frames of the traceback hold the chunk's tensors: let go of them before the next run.
            _forget_frames(error)
        if fault is not None:
            gc.collect()
        observed = self._observed(events, marks, routing) if observe else None
        run = Run(family, tokens >= self.tokens, issued, cold, fresh, measured, fault, site, observed)
        self.runs.append(run)
        if run.full and family is PLAIN:
            self.tokens = issued.new_tokens  # what the scheduler makes of it is the effective chunk
        outcomes = self._outcomes(run)
        self.all_ok = all(ok for ok, _ in outcomes)
        self.reached = max(self.reached, shape.new_tokens if self.all_ok else 0)
        self.device_usable = self.device_usable and all(usable for _, usable in outcomes)

    def _observed(self, events: list[dict[str, Any]], marks: list[Mark], routing: list[Routing]) -> Observed:
        """What a run that was watched showed. The history may have lost its beginning: it is counted from its end."""
        before = self.engine.meter.allocations() - sum(event["action"] == "alloc" for event in events)
        return Observed(
            made_of=compose(blocks_at_peak(events), self.engine.place),
            routing=routing[0] if routing else None,
            timeline=timeline(events, marks, before, self.engine.place),
        )

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

    def _full_runs(self, family: Family | None = None) -> list[Run]:
        """Runs at full size that came back or not, in order."""
        return [run for run in self.runs if run.full and (family is None or run.family is family)]

    def _judged(self) -> Run | None:
        """The run that the verdict is about: one that failed last, else the one with the largest transient.

        Of each shape its last run counts, and the process's very first run only where it was the only one.
        """
        full = self._full_runs()
        last = {run.family.word: run for run in (full[1:] or full)}
        if failed := [run for run in last.values() if not run.ok]:
            return failed[-1]
        return max(last.values(), key=lambda run: run.measured.peak.device_bytes, default=None)

    def part(self) -> Part:
        """This rank's part."""
        judged = self._judged()
        headroom = self.idle.headroom_bytes
        need = _need(judged, self.runs, self.tokens)
        fault = judged.fault if judged is not None else next((run.fault for run in self.runs if run.fault), None)
        notes = list(self.notes)
        if self.moved is not None and abs(self.moved) > DISTURBANCE_BYTES:
            verdict = "inconclusive"
            notes.append(f"free memory moved by {mib(self.moved)} under the probe, twice, and not by this process")
        elif fault is not None:
            verdict = "does-not-fit" if fault.is_memory else "fault"
        elif self.stopped_early:
            verdict = "does-not-fit"
            notes.append("the full chunk was not run: running out of memory does harm on this machine")
        elif judged is None or need is None:
            verdict = "fits"  # as far as this rank knows: it stopped because another one failed, whose part is worse
        else:
            verdict = "fits" if headroom - need.device_bytes >= self.margin else "tight"
            if self._pages(judged):
                verdict = "tight"
                notes.append("oversubscribed: the full chunk is far slower than smaller ones predict")
        shapes = tuple(_shape_run(run) for run in self.runs)
        word = judged.family.word if judged else PLAIN.word
        slope = self._slope(judged, need)
        return Part(verdict, headroom, need, shapes, slope, word, fault, tuple(notes), self._held(headroom))

    def _held(self, headroom: int) -> records.Held | None:
        """The engine's holdings, and what remains of the memory that was free before loading."""
        if not self.holdings:
            return None
        parts = {f"{name}_bytes": size for name, size in self.holdings.items()}
        rest = self.engine.budget().free_before_load_bytes - headroom - sum(parts.values())
        return records.Held(**parts, other_bytes=max(0, rest))

    def _slope(self, judged: Run | None, need: records.Need | None) -> tuple[advising.Point, ...]:
        """Device transients by size of the shape that is judged.

        Where it was run at one size only: those of the full chunk, and what it needs more than that, which is kept at
        every size (a depth or a number of sequences does not shrink with the chunk).
        """
        own = _points(self.runs, judged.family if judged else PLAIN).get("device_bytes", [])
        plain = _points(self.runs, PLAIN).get("device_bytes", [])
        if need is None or len(own) > 1 or not plain:
            return tuple(own)
        more = max(0, need.device_bytes - advising.need_at(plain, self.tokens))
        return tuple(advising.Point(point.tokens, point.need_bytes + more) for point in plain)

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
            shapes=[*record.shapes, *(replace(_shape_run(run), advised=True) for run in self.trials)],
            timings=self._timings(advised=True),
        )

    def _timings(self, *, advised: bool = False) -> dict[str, float]:
        now = time.monotonic()
        timings = {"probe_seconds": round(now - self.started, 3)}
        if advised and self.out_of_memory_at is not None:
            timings["oom_to_advice_seconds"] = round(now - self.out_of_memory_at, 3)
        return timings

    def _seen(self, need: records.Need | None) -> records.Need | None:
        """The need as a trial with smaller pools showed it, where a start's own pools left no room to."""
        full = [run for run in self.trials if run.ok and run.full]
        if (need is not None and not need.estimated) or not full:
            return need
        peak = full[-1].measured.peak
        return records.Need(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes, full[-1].shape.name)

    def _can_try(self, record: records.ProbeRecord) -> bool:
        """Whether advice is run: not where the start goes on as it is, nor where running out of memory does harm."""
        return record.verdict == "does-not-fit" and self.device_usable and not (self.wsl or self.unified)

    def _adviser(self, part: Part) -> Adviser:
        family = next(each for each in FAMILIES if each.word == part.word)
        rates = [run.new_tokens / run.seconds for run in part.shapes if run.outcome == "ok" and run.seconds > 0]
        return Adviser(
            engine=self.engine,
            points=part.points,
            chunk_tokens=self.tokens,
            headroom_bytes=part.headroom_bytes,
            margin_bytes=self.margin,
            align=self.limits.align,
            seconds=3 * self.tokens / max(rates) if rates else 0.0,
            run=lambda tokens: self._trial(family, tokens),
        )

    def _trial(self, family: Family, tokens: int) -> Trial:
        """Run ``family`` as advice, with the pools as they are now: in the record, and no part of the verdict.

        Raises:
            PlanRefused: nothing was run, or the device is lost.
        """
        self.limits = self.engine.limits()
        # Far beyond what came back so far, kernels are compiled and tuned: neither peak nor speed is a request's.
        cold = tokens >= 2 * self.reached
        run = self._try(family, tokens, cold=cold)
        if cold and self.all_ok:
            run = self._try(family, tokens, cold=False)
        need = run.measured.peak.device_bytes if run.ok else None
        leaves = self.start.headroom_bytes - need if need is not None else -1
        ranks = self.engine.gather((need, leaves, run.measured.seconds))
        needs = [each for each, _, _ in ranks if each is not None]
        return Trial(
            run.shape.new_tokens,
            max(needs) if len(needs) == len(ranks) else None,
            min(leaves for _, leaves, _ in ranks),
            max(seconds for _, _, seconds in ranks),
        )

    def _try(self, family: Family, tokens: int, *, cold: bool) -> Run:
        before = len(self.runs)
        self.run(family, tokens, cold=cold)
        if len(self.runs) == before:
            raise PlanRefused("the scheduler does not admit the chunk")
        run = self.runs.pop()
        self.trials.append(run)
        if not self.device_usable:
            raise PlanRefused(f"trying it ended in a fault: {run.fault.text if run.fault else 'on another rank'}")
        return run

    def timed_out(self, seconds: float) -> records.ProbeRecord:
        """The record of a probe that hangs; asks nothing of the device or of other ranks."""
        fault = Fault("time-out", False, False, False, f"no result within {seconds:.0f} s")
        shapes = tuple(_shape_run(run) for run in self.runs)
        hung = records.ShapeRun(
            name=PLAIN.name,
            sequences=1,
            new_tokens=self.tokens,
            cached_tokens=0,
            run="warm" if self._full_runs() else "cold",
            outcome="timeout",
            peak=records.Ledgers(0, 0, 0),
            seconds=round(seconds, 1),
        )
        part = Part("fault", self.idle.headroom_bytes, None, (*shapes, hung), (), PLAIN.word, fault, tuple(self.notes))
        return self._build(part, {self.engine.rank: part})

    def left_alone(self) -> records.ProbeRecord:
        """The record of this rank's failure, when the others cannot be asked."""
        part = self.part()
        note = f"rank {self.engine.rank} failed while the others wait for it in the forward; nothing smaller was run"
        return self._build(replace(part, notes=(*part.notes, note)), {self.engine.rank: part})

    def _build(self, part: Part, parts: Mapping[int, Part]) -> records.ProbeRecord:
        budget = self.engine.budget()
        fault = part.fault
        effective = self.tokens
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


def _points(runs: Sequence[Run], family: Family) -> dict[str, list[advising.Point]]:
    """Measured points by ledger, from the last run of each size that came back (warm where there was one).

    Only of runs before which unused memory was handed back: in the others what earlier runs held is counted as well.
    """
    latest = {run.shape.new_tokens: run.measured.peak for run in runs if run.ok and run.family is family and run.fresh}
    return {
        ledger: [advising.Point(tokens, getattr(peak, ledger)) for tokens, peak in latest.items()]
        for ledger in ("allocated_bytes", "reserved_bytes", "device_bytes")
        if latest
    }


def _need(judged: Run | None, runs: Sequence[Run], tokens: int) -> records.Need | None:
    """The transient of the shape that is judged: as run, or extrapolated from its smaller sizes; None if none did."""
    if judged is not None and judged.ok:
        peak = judged.measured.peak
        return records.Need(peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes, judged.shape.name)
    family = PLAIN if judged is None else judged.family
    points = _points(runs, family)
    if not points:
        return None
    estimate = {ledger: advising.need_at(known, tokens) for ledger, known in points.items()}
    return records.Need(**estimate, shape=family.name, estimated=True)


def _shape_run(run: Run) -> records.ShapeRun:
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
        peak=_ledgers(run.measured.peak),
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
