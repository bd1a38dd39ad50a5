"""The advice of one probe: calculated, or run on the engine before it is recommended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefill_probe.advice import Candidate, Point, need_at, recommend
from prefill_probe.engine import Budget, Engine, Geometry, NotResizable, PlanRefused, Pool
from prefill_probe.record import Advice
from prefill_probe.trial import MOST_RUNS, Flags, Proven, Trial, highest_ratio, largest_chunk


@dataclass
class Adviser:
    """What to type next, for a full chunk that does not leave the margin.

    Attributes:
        engine: idle.
        points: device transients of the worst shape, by size.
        chunk_tokens: of the full chunk.
        headroom_bytes: with the pools of this start.
        margin_bytes: what must remain.
        align: tokens; the resolution of a chunk.
        seconds: that the search for a chunk may take.
        run: runs the worst shape at so many tokens, with the pools as they are.
    """

    engine: Engine
    points: Sequence[Point]
    chunk_tokens: int
    headroom_bytes: int
    margin_bytes: int
    align: int
    seconds: float
    run: Callable[[int], Trial]
    _speeds: dict[int, float] = field(default_factory=dict)

    # Calculated ------------------------------------------------------------------------------------------------

    def calculated(self) -> list[Advice]:
        """Candidates by arithmetic, with what the engine's planner says of them. Nothing is run."""
        budget = self.engine.budget()
        return [self._calculated(candidate, budget) for candidate in self._candidates(budget)]

    def _candidates(self, budget: Budget) -> list[Candidate]:
        if not self.points:
            return []
        return recommend(
            self.points,
            chunk=self.chunk_tokens,
            headroom_bytes=self.headroom_bytes,
            margin_bytes=self.margin_bytes,
            budget=budget,
            align=self.align,
        )

    def _calculated(self, candidate: Candidate, budget: Budget, reason: str = "") -> Advice:
        cost = ""
        ratio = candidate.flags.get("--memory-ratio")
        if ratio is not None and budget.memory_ratio is not None:
            try:
                cost = _pool_cost(self.engine.plan(budget.memory_ratio), self.engine.plan(float(ratio)))
            except PlanRefused as refusal:
                return Advice(candidate.flags, False, None, None, "", f"the engine's planner refuses it: {refusal}")
        return Advice(
            candidate.flags, False, candidate.need_bytes, candidate.leaves_bytes, cost, reason or candidate.reason
        )

    # Run -------------------------------------------------------------------------------------------------------

    def proven(self) -> list[Advice]:
        """What was run and left the margin, least harm to the context first; then what was not, each with the reason.

        The pools have the sizes of this start again afterwards.

        Raises:
            PlanRefused: they could not be made again; the engine is damaged.
        """
        budget = self.engine.budget()
        found: list[Proven] = []
        untried: list[Advice] = []
        try:
            self._try_all(budget, found, untried)
        finally:
            now = self.engine.resize({})
        return [self._advice(each, now) for each in found] + untried + _others(budget)

    def _try_all(self, budget: Budget, found: list[Proven], untried: list[Advice]) -> None:
        chunk = self._chunk() if budget.chunk_governs and self.points else None
        if chunk is not None:
            found.append(Proven({"--max-prefill-length": chunk.tokens}, chunk))
            if chunk.need_bytes is not None:
                self.points = [*self.points, Point(chunk.tokens, chunk.need_bytes)]
        if not self.points:
            # Nothing came back: the need is more than the headroom, and how much more the trials find out.
            self.points = [Point(self.chunk_tokens, self.headroom_bytes + 1)]
        try:
            if budget.ratio_governs:
                found += self._ratios(budget, chunk)
        except NotResizable as refusal:
            for candidate in self._candidates(budget):
                if "--max-prefill-length" not in candidate.flags:
                    untried.append(self._calculated(candidate, budget, str(refusal)))
            return
        except PlanRefused as refusal:
            untried.append(Advice({"--memory-ratio": ""}, False, None, None, "", str(refusal)))
        for pool in budget.pools:
            try:
                found.append(self._pool(pool))
            except PlanRefused as refusal:
                untried.append(Advice({pool.flag: ""}, False, None, None, "", str(refusal)))

    def _chunk(self) -> Trial | None:
        return largest_chunk(
            self._timed,
            self.points,
            chunk=self.chunk_tokens,
            headroom_bytes=self.headroom_bytes,
            margin_bytes=self.margin_bytes,
            align=self.align,
            seconds=self.seconds,
        )

    def _ratios(self, budget: Budget, chunk: Trial | None) -> list[Proven]:
        """The full chunk at a lower ratio; before it, half the chunk at a ratio that keeps more of the KV pool.

        Raises:
            PlanRefused: no ratio helps.
        """
        ratio = self._ratio(budget, self.chunk_tokens, self.headroom_bytes)
        half = self.chunk_tokens // 2 // self.align * self.align
        if not budget.chunk_governs or half < self.align or (chunk is not None and chunk.tokens >= half):
            return [ratio]
        try:
            pair = self._ratio(budget, half, self._headroom_by(ratio, budget))
        except PlanRefused:
            return [ratio]
        if pair.pools is None or ratio.pools is None or pair.pools.kv_tokens <= ratio.pools.kv_tokens:
            return [ratio]
        return [Proven({"--max-prefill-length": half} | pair.flags, pair.trial, pair.pools), ratio]

    def _headroom_by(self, proven: Proven, budget: Budget) -> int:
        """This start's headroom as a trial at another ratio tells it: pools that are made anew take a little more."""
        if proven.trial.need_bytes is None or budget.memory_ratio is None:
            return self.headroom_bytes
        freed = (budget.memory_ratio - proven.flags["--memory-ratio"]) * budget.free_before_load_bytes
        return proven.trial.need_bytes + proven.trial.leaves_bytes - int(freed)

    def _ratio(self, budget: Budget, tokens: int, headroom_bytes: int) -> Proven:
        return highest_ratio(
            self._resized,
            self.points,
            tokens=tokens,
            headroom_bytes=headroom_bytes,
            margin_bytes=self.margin_bytes,
            budget=budget,
        )

    def _pool(self, pool: Pool) -> Proven:
        """The largest size of an explicit pool that was run and left the margin, as far as the runs' own numbers lead.

        Raises:
            PlanRefused: none does.
        """
        short = need_at(self.points, self.chunk_tokens) + self.margin_bytes - self.headroom_bytes
        value = pool.value
        for _ in range(MOST_RUNS):
            value = (value - max(1, -(-short // pool.unit_bytes))) // pool.step * pool.step
            if value < pool.floor:
                raise PlanRefused(f"the engine needs at least {pool.floor}, which leaves too little")
            trial, pools = self._resized({pool.flag: value}, self.chunk_tokens)
            if trial.leaves_bytes >= self.margin_bytes:
                return Proven({pool.flag: value}, trial, pools)
            short = self.margin_bytes - trial.leaves_bytes
        raise PlanRefused(f"not even {value} leaves enough")

    def _resized(self, flags: Flags, tokens: int) -> tuple[Trial, Geometry]:
        pools = self.engine.resize(flags)
        return self._timed(tokens), pools

    def _timed(self, tokens: int) -> Trial:
        trial = self.run(tokens)
        if trial.need_bytes is not None and trial.seconds > 0 and self.engine.meter.timed:
            self._speeds[trial.tokens] = trial.tokens / trial.seconds
        return trial

    def _advice(self, proven: Proven, now: Geometry) -> Advice:
        costs = ["KV cache unchanged" if proven.pools is None else _pool_cost(now, proven.pools)]
        speed, full = self._speeds.get(proven.trial.tokens), self._speeds.get(self.chunk_tokens)
        if speed and full and proven.trial.tokens != self.chunk_tokens:
            slower = round(100 * (1 - speed / full))
            costs.append(f"prefill {slower} % slower" if slower > 0 else "prefill no slower")
        cost = ", ".join(filter(None, costs))
        return Advice(proven.flags, True, proven.trial.need_bytes, proven.trial.leaves_bytes, cost, "")


def _others(budget: Budget) -> list[Advice]:
    return [Advice({flag: ""}, False, None, None, cost, "") for flag, cost in budget.others]


def _pool_cost(now: Geometry, then: Geometry) -> str:
    parts = []
    if now.kv_tokens != then.kv_tokens:
        parts.append(f"KV cache {now.kv_tokens} -> {then.kv_tokens} tokens")
    if now.expert_slots != then.expert_slots:
        parts.append(f"expert cache {now.expert_slots} -> {then.expert_slots} slots")
    return ", ".join(parts)
