"""The right half of the picture: peaks against chunk length, with the headroom."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prefill_probe.record import ProbeRecord
from prefill_probe.render.picture import ALARM, INK, MUTED, PALE, PALETTE, TITLE, spread
from prefill_probe.sizes import MIB, mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of each shape in turn.
_LOOKS = tuple(zip(("o", "s", "^", "D", "v", "P", "X"), (PALETTE[0], *PALETTE[4:], PALETTE[2]), strict=False))
# What the record adds to a shape's name: its size.
_SIZE = re.compile(r"(?:^| of )\d+ tokens")


@dataclass(frozen=True)
class Point:
    """A peak over idle: measured, predicted, or where memory ran out."""

    shape: str
    tokens: int
    peak_bytes: int
    kind: str


def points(record: ProbeRecord) -> list[Point]:
    """Every size of every shape once, by its last run; predicted ones where nothing was measured.

    Runs before which nothing was handed back hold what earlier ones left, and are passed over.
    """
    last: dict[tuple[str, int], Point] = {}
    for run in record.shapes:
        if run.outcome not in ("ok", "oom") or "nothing handed back" in run.name:
            continue
        shape = _SIZE.sub("", run.name) or "full chunk"
        key, kind = (shape, run.new_tokens), "measured" if run.outcome == "ok" else "ran out"
        if kind == "measured" or key not in last or last[key].kind != "measured":
            last[key] = Point(shape, run.new_tokens, run.peak.device_bytes, kind)
    need, effective = record.need, record.chunk.effective
    if need is not None and not need.estimated:
        last[need.shape, effective] = Point(need.shape, effective, need.device_bytes, "measured")
    found = list(last.values())
    if need is not None and need.estimated:
        found.append(Point(need.shape, effective, need.device_bytes, "predicted"))
    measured = {point.tokens for point in found if point.kind == "measured"}
    for line in record.advice:
        tokens = line.flags.get("--max-prefill-length")
        if line.was_run or line.peak_bytes is None or tokens is None or tokens in measured:
            continue
        found.append(Point("full chunk", int(tokens), line.peak_bytes, "predicted"))
    return sorted(found, key=lambda point: (point.tokens, point.peak_bytes))


def draw(axes: Axes, record: ProbeRecord) -> None:
    """Draw every size that was run or predicted, the headroom, and what of it the margin leaves."""
    found, headroom = points(record), record.memory.headroom_bytes / MIB
    axes.set_title("Peak of one chunk over idle", **TITLE)
    right = max([record.chunk.effective, *(point.tokens for point in found)]) * 1.12
    top = max([headroom, *(point.peak_bytes / MIB for point in found)]) * 1.18 or 1
    axes.set(xlim=(0, right), ylim=(0, top), xlabel="tokens in a chunk", ylabel="MiB")
    axes.set_xticks(_ticks(right))
    axes.axhspan(headroom, top, color=PALE, zorder=0)
    axes.axhline(headroom, color=INK, linewidth=1.6)
    above = "a chunk that peaks up here does not fit"
    axes.text(right * 0.015, top * 0.985, above, fontsize=9.5, color=MUTED, va="top", style="italic")
    margin = headroom - record.memory.margin_bytes / MIB
    if 0 < margin < headroom:
        axes.axhline(margin, color=MUTED, linewidth=1.2, linestyle=":")
    levels = [(f"less margin\n{margin:.0f} MiB", margin, MUTED)] if 0 < margin < headroom else []
    levels.append((f"headroom\n{headroom:.0f} MiB", headroom, INK))
    places = spread([level for _, level, _ in levels], top * 0.075, top)
    for (text, _, colour), place in zip(levels, places, strict=True):
        axes.text(right * 1.015, place, text, va="center", fontsize=10, color=colour)
    if not found:
        text = "no chunk came back"
        axes.text(right / 2, headroom / 2, text, ha="center", va="center", fontsize=13, color=MUTED)
        return
    shapes = list(dict.fromkeys(point.shape for point in found))
    for number, (shape, (marker, colour)) in enumerate(zip(shapes, _LOOKS, strict=False)):
        aside = number * right / 55  # shapes of the same size stand side by side
        _draw_shape(axes, [_beside(point, aside) for point in found if point.shape == shape], marker, colour)
    _name_values(axes, found, record, right, top)
    _legend(axes, found, shapes)


def _beside(point: Point, by: float) -> Point:
    return replace(point, tokens=point.tokens - round(by))


def _draw_shape(axes: Axes, found: Sequence[Point], marker: str, colour: str) -> None:
    """One shape's points, and the line through those that say what it needs."""
    needs = [point for point in found if point.kind != "ran out"]
    axes.plot([p.tokens for p in needs], [p.peak_bytes / MIB for p in needs], color=colour, linewidth=1, alpha=0.5)
    for point in found:
        look: dict[str, Any] = {"marker": marker, "color": colour, "markersize": 9, "markeredgewidth": 1.8}
        if point.kind == "predicted":
            look["markerfacecolor"] = "white"
        elif point.kind == "ran out":
            look |= {"marker": "x", "color": ALARM, "markersize": 10, "markeredgewidth": 2.4}
        axes.plot([point.tokens], [point.peak_bytes / MIB], linestyle="none", zorder=3, **look)


def _name_values(axes: Axes, found: Sequence[Point], record: ProbeRecord, right: float, top: float) -> None:
    """The value at the largest point of each size, as far as the values leave room for one another."""
    highest = {point.tokens: point for point in found if point.kind != "ran out"}
    effective = record.chunk.effective
    taken: list[tuple[float, float]] = []
    for point in sorted(highest.values(), key=lambda point: (point.tokens != effective, -point.tokens)):
        height = point.peak_bytes / MIB
        if any(abs(point.tokens - x) < 0.13 * right and abs(height - y) < 0.06 * top for x, y in taken):
            continue
        taken.append((point.tokens, height))
        about = "about " if point.kind == "predicted" else ""
        axes.annotate(
            f"{about}{mib(point.peak_bytes)}",
            (point.tokens, height),
            (-9, 6),
            textcoords="offset points",
            ha="right" if point.tokens > 0.18 * right else "left",
            va="bottom",
            fontsize=10,
            fontweight="bold" if point.tokens == effective else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
            zorder=4,
        )


def _legend(axes: Axes, found: Sequence[Point], shapes: Sequence[str]) -> None:
    """What solid, hollow and crossed points are, and which shape has which marker if there are several."""
    from matplotlib.lines import Line2D

    kinds = {point.kind for point in found}
    several = len(shapes) > 1
    entries = []
    for shape, (marker, colour) in zip(shapes, _LOOKS, strict=False):
        if several:
            entries.append(Line2D([], [], linestyle="none", marker=marker, color=colour, label=shape))
    solid, hollow = ("solid: measured", "hollow: predicted") if several else ("measured", "predicted")
    if kinds == {"measured"} and several:
        kinds = set()
    dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "color": PALETTE[0]}
    if "measured" in kinds:
        entries.append(Line2D([], [], label=solid, **dot))
    if "predicted" in kinds:
        entries.append(Line2D([], [], label=hollow, markerfacecolor="white", markeredgewidth=1.8, **dot))
    if "ran out" in kinds:
        label = "ran out of memory (held until then)"
        entries.append(
            Line2D([], [], linestyle="none", marker="x", color=ALARM, markeredgewidth=2.4, markersize=8, label=label)
        )
    axes.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=(-0.015, 1.08 if len(entries) > 3 else 1.06),
        ncols=3,
        fontsize=9.5,
        frameon=False,
        borderpad=0,
        handletextpad=0.3,
        columnspacing=1.2,
    )


def _ticks(right: float) -> list[int]:
    """Multiples of a power of two, at most seven."""
    step = 1
    while right / step > 7:
        step *= 2
    return list(range(0, int(right) + 1, step))
