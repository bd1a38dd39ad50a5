"""What a peak is made of: the allocator's own history of one chunk, read for the moment when most was held."""

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
    return [
        Block(int(event["size"]), tuple((f["filename"], int(f["line"]), f["name"]) for f in event.get("frames", ())))
        for event in held
    ]


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
