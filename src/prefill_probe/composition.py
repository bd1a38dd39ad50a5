"""What a chunk holds: the allocator's own history of one chunk, read for its highest moment and over its course."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# One frame of a stack: file, line, function. Innermost first, as the allocator keeps them.
Frame = tuple[str, int, str]
# What a stack is in the engine: a component, and the place in a person's words.
Place = Callable[[Sequence[Frame]], tuple[str, str]]


@dataclass(frozen=True)
class Block:
    """Memory that was allocated during the chunk and held at its peak."""

    size_bytes: int
    frames: tuple[Frame, ...]


# A layer that begins, or -1 where none runs any more, after so many allocations of the process.
Mark = tuple[int, int]

# Of a timeline, about: as many as a picture can show, and few enough that a record stays small.
TIMELINE_POINTS = 160
_POINTS_OUTSIDE = 8


@dataclass(frozen=True)
class Composition:
    """The peak of one chunk over idle, by component.

    Attributes:
        components: bytes by component, largest first.
        largest_bytes: of the largest single block.
        largest_site: where it was allocated; empty if unknown.
    """

    components: dict[str, int]
    largest_bytes: int
    largest_site: str


@dataclass(frozen=True)
class Timeline:
    """Live memory over one chunk: of every layer the highest moments of equal stretches of allocations and frees.

    Attributes:
        layers: of each moment, the layer that ran; -1 before the first one and after the last.
        components: of each component, bytes held at each moment, the component that holds most at the peak first.
    """

    layers: tuple[int, ...]
    components: dict[str, tuple[int, ...]]


def blocks_at_peak(events: Iterable[dict[str, Any]]) -> list[Block]:
    """The blocks that were held when the events' sum was highest.

    Args:
        events: of ``torch.cuda.memory``'s trace of one device, in order: ``action``, ``addr``, ``size`` (bytes),
            ``frames``. Frees of blocks that are older than the trace, and other actions, are passed over.
    """
    live: dict[int, dict[str, Any]] = {}
    now = highest = 0
    held: list[dict[str, Any]] = []
    stale = False  # whether ``live`` has grown to a new height that ``held`` does not show yet
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
            if now > highest:
                highest, stale = now, True
        elif event["action"] == "free_completed" and event["addr"] in live:
            if stale:
                held, stale = list(live.values()), False
            now -= live.pop(event["addr"])["size"]
    if stale:
        held = list(live.values())
    return [Block(int(event["size"]), _frames(event)) for event in held]


def compose(blocks: Sequence[Block], place: Place) -> Composition | None:
    """Sort ``blocks`` by component; None if there are none."""
    if not blocks:
        return None
    sums: dict[str, int] = {}
    for block in blocks:
        component = place(block.frames)[0]
        sums[component] = sums.get(component, 0) + block.size_bytes
    largest = max(blocks, key=lambda block: block.size_bytes)
    ordered = dict(sorted(sums.items(), key=lambda item: -item[1]))
    return Composition(ordered, largest.size_bytes, place(largest.frames)[1])


def timeline(events: Sequence[dict[str, Any]], marks: Sequence[Mark], before: int, place: Place) -> Timeline | None:
    """Live memory over the chunk, by component; None where nothing was allocated.

    Every layer has as many moments as any other; what comes before and after all of them has few.

    Args:
        events: as for ``blocks_at_peak``.
        marks: in order.
        before: allocations of the process before the first event, as marks count them.
        place: called once for every stack.
    """
    places: dict[tuple[Frame, ...], str] = {}
    live: dict[int, tuple[str, int]] = {}
    held: dict[str, int] = {}
    now, moments = 0, []
    parts = _by_layer(events, marks, before)
    each = max(1, TIMELINE_POINTS // max(1, sum(layer >= 0 for layer, _ in parts)))
    for layer, steps in parts:
        stretch = -(-len(steps) // (each if layer >= 0 or len(parts) == 1 else min(each, _POINTS_OUTSIDE)))
        for first in range(0, len(steps), stretch):
            highest = (now, layer, dict(held))
            for event in steps[first : first + stretch]:
                if event["action"] == "alloc":
                    frames = _frames(event)
                    if frames not in places:
                        places[frames] = place(frames)[0]
                    component, size = places[frames], int(event["size"])
                    live[event["addr"]] = (component, size)
                    now, held[component] = now + size, held.get(component, 0) + size
                    if now > highest[0]:
                        highest = (now, layer, dict(held))
                elif event["addr"] in live:
                    component, size = live.pop(event["addr"])
                    now, held[component] = now - size, held[component] - size
            moments.append(highest)
    if not any(total for total, _, _ in moments):
        return None
    at_peak = max(moments, key=lambda moment: moment[0])[2]
    return Timeline(
        layers=tuple(layer for _, layer, _ in moments),
        components={
            name: tuple(parts.get(name, 0) for _, _, parts in moments)
            for name in sorted(held, key=lambda name: -at_peak.get(name, 0))
        },
    )


def _by_layer(
    events: Sequence[dict[str, Any]], marks: Sequence[Mark], before: int
) -> list[tuple[int, list[dict[str, Any]]]]:
    """The allocations and frees among ``events``, in order, by the layer that ran.

    A layer begins with its first allocation: what happens between two layers is the first one's.
    """
    begins = [mark for mark, then in zip(marks, [*marks[1:], (0, -1)], strict=False) if mark[1] >= 0 or then[1] < 0]
    waiting, count = begins[::-1], before
    parts: list[tuple[int, list[dict[str, Any]]]] = [(-1, [])]
    for event in events:
        if event["action"] not in ("alloc", "free_completed"):
            continue
        if event["action"] == "alloc":
            while waiting and waiting[-1][0] <= count:
                parts.append((waiting.pop()[1], []))
            count += 1
        parts[-1][1].append(event)
    return [(layer, steps) for layer, steps in parts if steps]


def _frames(event: dict[str, Any]) -> tuple[Frame, ...]:
    return tuple((f["filename"], int(f["line"]), f["name"]) for f in event.get("frames", ()))
