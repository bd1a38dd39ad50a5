"""The guard: how large a chunk may be now, by what this boot's chunks needed and what memory is left.

Pure arithmetic over measured sizes. A host asks before it prepares a prefill batch, when nothing is allocated yet.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from prefill_probe.record import Ledgers, ProbeRecord
from prefill_probe.shape import FAMILIES
from prefill_probe.sizes import MIB

# By how much more than it asks for a chunk may take: the allocator's largest segment for blocks that share one.
GRANULARITY_BYTES = 20 * MIB
# Chunks that may need more than a plain one of their size; the largest image is in no small one.
_WORSE = tuple(family.name for family in FAMILIES if family.word not in ("full", "image"))


@dataclass(frozen=True)
class Needs:
    """Device transients of this boot's chunks, by size: the worst of the shapes that were run at each.

    Attributes:
        sizes: tokens, ascending; at least one.
        bytes: of each, never falling.
        allocated: what each held at its peak; some of it may lie in memory that the allocator had when idle.
        fragments_bytes: what a chunk took more when it ran over the allocator's leavings of others.
    """

    sizes: tuple[int, ...]
    bytes: tuple[int, ...]
    allocated: tuple[int, ...]
    fragments_bytes: int = 0

    def at(self, tokens: int) -> int:
        """An upper bound of the need of ``tokens`` tokens.

        What is live at any moment of a chunk is a sum of buffers, each of which grows with the tokens, up to a cap or
        for ever, or does not grow: so what is held never falls with the tokens, and what is held for each of them never
        rises. Between two sizes that were run the need is at most that of the larger, and at most what the smaller
        held in proportion, rounded as the allocator may.
        """
        after = bisect.bisect_left(self.sizes, tokens)
        above = self.bytes[after] if after < len(self.sizes) else None
        if above is not None and (self.sizes[after] == tokens or not after):
            return above
        below = self.held_at(tokens) + GRANULARITY_BYTES
        return below if above is None else min(above, below)

    def held_at(self, tokens: int) -> int:
        """An upper bound of what a chunk of ``tokens`` tokens holds at its peak, in blocks, before rounding."""
        after = bisect.bisect_left(self.sizes, tokens)
        bounds = [self.allocated[after]] if after < len(self.sizes) else []
        if after:
            bounds.append(-(-self.allocated[after - 1] * tokens // self.sizes[after - 1]))
        return min(bounds)


def needs_of(record: ProbeRecord) -> Needs | None:
    """The needs that a record's runs show; None if no chunk came back."""
    last: dict[tuple[str, int], Ledgers] = {}
    fragments = 0
    runs = [run for run in record.shapes if run.outcome == "ok"]
    if len(runs) > 1 and any(run.new_tokens == runs[0].new_tokens for run in runs[1:]):
        del runs[0]  # the process's first: it loaded and tuned what the others found there
    for run in runs:
        name, _, kept = run.name.partition(", nothing handed back")
        shape = (name, run.new_tokens)
        if not kept:
            last[shape] = run.peak
        elif shape in last:
            # Over its own leavings and those of a short chunk: more than afresh is fragmentation.
            fragments = max(fragments, run.peak.device_bytes - last[shape].device_bytes)
    if not last:
        return None
    kinds: dict[int, set[str]] = {}
    for name, tokens in last:
        kinds.setdefault(tokens, set()).update(each for each in _WORSE if name.startswith(each))
    # Where only some of the kinds were run, which the walk does for a slope, another may need more.
    sizes = [size for size in sorted(kinds) if kinds[size] >= kinds[max(kinds)]]
    device, allocated = [0], [0]
    for size in sizes:
        peaks = [peak for (_, tokens), peak in last.items() if tokens == size]
        device.append(max(device[-1], *(peak.device_bytes for peak in peaks)))
        allocated.append(max(allocated[-1], *(peak.allocated_bytes for peak in peaks)))
    return Needs(tuple(sizes), tuple(device[1:]), tuple(allocated[1:]), fragments)


@dataclass
class Counters:
    """What the guard of a server did since its start."""

    passes_shrunk: int = 0
    tokens_delayed: int = 0
    requests_refused: int = 0
    misses: int = 0

    def text(self) -> str:
        """In one line."""
        return (
            f"{self.passes_shrunk} passes shrunk, {self.tokens_delayed} tokens delayed, "
            f"{self.requests_refused} requests refused, {self.misses} misses"
        )


@dataclass(frozen=True)
class Memory:
    """What the process can obtain at one moment.

    Attributes:
        free_bytes: on the device.
        unused_bytes: that the allocator holds and can hand out.
    """

    free_bytes: int
    unused_bytes: int


def fits(needs: Needs, tokens: int, memory: Memory) -> bool:
    """Whether a chunk of ``tokens`` is sure to come back: in fresh memory, or with what the allocator holds unused."""
    need = needs.at(tokens)
    return need <= memory.free_bytes or need + needs.fragments_bytes <= memory.free_bytes + memory.unused_bytes


def largest(needs: Needs, budget: int, memory: Memory, align: int) -> int:
    """The largest chunk of at most ``budget`` tokens that ``fits``: all of it, or whole units of ``align``; 0: none."""
    if fits(needs, budget, memory):
        return budget
    low, high = 0, -(-budget // align)  # in units: low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(needs, middle * align, memory):
            low = middle
        else:
            high = middle
    return low * align


def sizes_to_measure(full: int, align: int) -> list[int]:
    """Sizes below a full chunk that are run so that the guard knows what a smaller one needs: a quarter, and a unit.

    More would bind closer between them, and cost every boot a run for each shape.
    """
    return [tokens for tokens in sorted({full // 4 // align * align, align}, reverse=True) if align <= tokens < full]
