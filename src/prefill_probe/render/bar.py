"""The left half of the picture: where the memory went, as one bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefill_probe.record import Held, ProbeRecord
from prefill_probe.render.picture import ALARM, GREY, INK, MUTED, PALETTE, TITLE, spread
from prefill_probe.sizes import GIB, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {
    "weights_bytes": "weights",
    "expert_cache_bytes": "expert cache",
    "kv_pool_bytes": "KV pool",
    "state_pool_bytes": "state pool",
    "graphs_bytes": "CUDA graphs",
    "other_bytes": "other",
}
# Where the bar's own labels begin and end, in widths of the bar.
_LEFT, _RIGHT = -1.2, 3.15


@dataclass(frozen=True)
class Part:
    """A piece of the bar, from the bottom up. ``kind``: held, transient or free."""

    name: str
    size_bytes: int
    kind: str


def parts(record: ProbeRecord) -> list[Part]:
    """Where ``free_before_load_bytes`` is, without what is empty; the transient may reach beyond it."""
    memory = record.memory
    used = max(0, memory.free_before_load_bytes - memory.headroom_bytes)
    held = [Part("in use when idle", used, "held")] if memory.held is None else _held(memory.held)
    need = record.need.device_bytes if record.need else 0
    found = [*held, Part("transient", need, "transient"), Part("free", memory.headroom_bytes - need, "free")]
    return [part for part in found if part.size_bytes > 0]


def _held(held: Held) -> list[Part]:
    return [Part(name, getattr(held, field), "held") for field, name in _NAMES.items()]


def draw(axes: Axes, record: ProbeRecord) -> None:
    """Draw the parts with their names and sizes, what was free before loading, and the memory ratio."""
    memory, pieces = record.memory, parts(record)
    capacity = memory.free_before_load_bytes
    top = max(capacity, sum(part.size_bytes for part in pieces)) / GIB
    axes.set_title("Where the memory went", **TITLE)
    bottom, centres = 0.0, []
    for part, look in zip(pieces, _looks(pieces), strict=True):
        height = part.size_bytes / GIB
        axes.bar(0.5, height, bottom=bottom, width=1, align="center", **look)
        centres.append(bottom + height / 2)
        bottom += height
    about = "about " if record.need and record.need.estimated else ""
    _label(axes, pieces, centres, top, about)
    ratio = record.flags.get("--memory-ratio")
    _mark(axes, capacity / GIB, f"free before loading\n{shown(capacity)} (capacity)", "bottom", "-")
    if isinstance(ratio, float) and capacity:
        _mark(axes, ratio * capacity / GIB, f"--memory-ratio {ratio:g}\n{shown(int(ratio * capacity))}", "top", "--")
    axes.set(xlim=(_LEFT, _RIGHT), ylim=(0, top * 1.08 or 1), xticks=[], ylabel="GiB")
    axes.spines["bottom"].set_visible(False)
    before = memory.total_bytes - capacity
    if before > 0:
        others = sum(each.bytes for each in record.neighbours or [])
        of_others = f"\n{shown(others)} of it by other processes" if others else ""
        text = f"of the GPU's {shown(memory.total_bytes)}; {shown(before)} were in use before loading{of_others}"
        axes.text(_LEFT, -0.025 * top, text, fontsize=9, color=MUTED, va="top")


def _looks(pieces: Sequence[Part]) -> list[dict[str, Any]]:
    """How each part is drawn; a component has the same colour in every record."""
    colours = dict(zip(_NAMES.values(), PALETTE, strict=False)) | {"other": GREY, "in use when idle": GREY}
    looks: list[dict[str, Any]] = []
    for part in pieces:
        if part.kind == "transient":
            looks.append({"facecolor": "white", "edgecolor": ALARM, "hatch": "////"})
        elif part.kind == "free":
            looks.append({"facecolor": "white", "edgecolor": MUTED, "linestyle": ":"})
        else:
            looks.append({"facecolor": colours[part.name], "edgecolor": "white", "linewidth": 0.6})
    return looks


def _label(axes: Axes, pieces: Sequence[Part], centres: Sequence[float], top: float, about: str) -> None:
    """Every part by name and size, beside the bar, in its order; ``about`` stands before a transient's size."""
    places = spread(list(centres), top * 1.08 * 0.058, top * 1.05)
    for part, centre, place in zip(pieces, centres, places, strict=True):
        colour = ALARM if part.kind == "transient" else INK
        weight = "bold" if part.kind != "held" else "normal"
        axes.plot((1.02, 1.1, 1.2), (centre, place, place), color=MUTED, linewidth=0.7)
        axes.text(1.25, place, part.name, va="center", color=colour, fontweight=weight)
        size = (about if part.kind == "transient" else "") + shown(part.size_bytes)
        axes.text(_RIGHT, place, size, va="center", ha="right", color=colour, fontweight=weight)


def _mark(axes: Axes, height: float, text: str, side: str, style: str) -> None:
    """A level across the bar, with its label on the left, above (``bottom``) or below the line."""
    axes.plot((_LEFT, 1.02), (height, height), color=INK, linewidth=1.3, linestyle=style)
    axes.annotate(
        text,
        (_LEFT + 0.03, height),
        (0, 3 if side == "bottom" else -3),
        textcoords="offset points",
        va=side,
        fontsize=9.5,
        color=INK,
    )
