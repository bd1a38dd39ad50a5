"""The walk: which shapes are run at which sizes, and what is noted of each run."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from prefill_probe import advice as advising
from prefill_probe._runs import Observed, Run, points_of
from prefill_probe.composition import Mark, blocks_at_peak, compose, timeline
from prefill_probe.engine import Engine, PlanRefused, Routing, ShapeRefused
from prefill_probe.faults import EX_CONFIG, EX_SOFTWARE, chain_of, classify
from prefill_probe.guard import sizes_to_measure
from prefill_probe.meter import Measured
from prefill_probe.neighbours import moved_bytes
from prefill_probe.settings import Mode, ProbeSettings, margin_for
from prefill_probe.shape import FAMILIES, PLAIN, Family, Limits, full_chunk, largest_power_of_two_below
from prefill_probe.sizes import MIB, mib
from prefill_probe.trial import Trial
from prefill_probe.watch import bounded

Progress = Callable[[str], None]

# Free memory that moved by more than this, and not by this process, disturbs a measurement.
DISTURBANCE_BYTES = 32 * MIB
# What the allocator takes from the device at once.
_SEGMENT_BYTES = 2 * MIB
# Turns of a short and a full chunk, while reserved memory grows at each.
_TURNS = 3
# Of a full chunk: where a chunk before it was so long, the allocator's pages (20 MiB) suit the full one least.
_SHORTER = 5 / 8
# How long a rank whose chunk failed waits for the others. They may be inside a collective of the same forward, where
# this rank will never come, and nothing but the end of their processes frees them.
PATIENCE_SECONDS = 3.0


class Walk:
    """The runs of one probe, in their order.

    Attributes:
        runs: all of them; those that advice asks for are in ``trials``.
        tokens: new tokens of a full chunk.
        before, idle: the first reading, and the last.
        reached: new tokens of the largest shape that came back on every rank.
    """

    def __init__(
        self, engine: Engine, settings: ProbeSettings, progress: Progress, left_alone: Callable[[], None]
    ) -> None:
        """``left_alone``: called, by another thread, where this rank's chunk failed and the others do not answer."""
        self.engine = engine
        self.settings = settings
        self.progress = progress
        self.left_alone = left_alone
        self.started = time.monotonic()
        self.identity = engine.identity()
        self.limits: Limits = engine.limits()
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
        """Every shape at full size, smaller ones where it does not come back, and the worst shape again."""
        for family in self.families:
            if not self._comes_back(family):
                if self.settings.mode is not Mode.ENFORCE:  # it may serve all the same
                    self._run_for_guard()
                return
        self._repeat(self._worst())
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
        peaks = {run.family.word: run.measured.peak.device_bytes for run in self.last_full_runs()}
        ranks = self.engine.gather(peaks)
        return max((each for each in FAMILIES if each.word in peaks), key=lambda f: max(rank[f.word] for rank in ranks))

    def _repeat(self, family: Family) -> None:
        """``family`` at full size again, after shorter chunks, with nothing handed back to the device in between.

        That is how requests meet the allocator: the shorter chunk is at first in an empty cache, whose memory is then
        divided as suits it (the one after it is then of a kind that follows no other full chunk), and at every further
        turn in what the full one left. Reserved memory that grows at each of those is fragmentation.
        """
        shape = family.shape(self.limits, self.tokens, self.tokens)
        opening = PLAIN if shape is None or shape.cached_tokens else family
        first = self.full_runs(family)[-1].measured.peak
        reserved: list[int] = []
        for turn in range(1 + _TURNS):
            units = 1 if turn else max(1, int(self.tokens * _SHORTER) // self.limits.align)
            self.run(PLAIN, min(units * self.limits.align, self.tokens), cold=False, fresh=turn == 0)
            if self.all_ok:
                self.run(family if turn else opening, self.tokens, cold=False, fresh=False, observe=turn > 0)
            if not self.all_ok:
                return
            again = self.runs[-1].measured.peak
            reserved.append(again.reserved_bytes)
            if turn and not any(self.engine.gather(reserved[-1] - reserved[-2] > DISTURBANCE_BYTES)):
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
        need = advising.need_at(points_of(self.runs, PLAIN)["device_bytes"], target)
        safe = all(self.engine.gather(need + reserve <= self.before.headroom_bytes))
        self.stopped_early = not safe
        return safe

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
            forget_frames(error)
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
            self.left_alone()

        status = EX_CONFIG if run.fault.is_memory else EX_SOFTWARE
        with bounded(PATIENCE_SECONDS, report, status):
            return self.engine.gather((False, run.fault.retryable))

    def full_runs(self, family: Family | None = None) -> list[Run]:
        """Runs at full size that came back or not, in order."""
        return [run for run in self.runs if run.full and (family is None or run.family is family)]

    def last_full_runs(self) -> list[Run]:
        """Of each shape its last run at full size; the process's very first only where there is no other."""
        full = self.full_runs()
        return list({run.family.word: run for run in (full[1:] or full)}.values())

    # For advice ----------------------------------------------------------------------------------------------

    def trial(self, family: Family, tokens: int) -> Trial:
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


def forget_frames(error: BaseException) -> None:
    """Let go of the locals of every frame that ``error`` and the errors behind it passed through."""
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
