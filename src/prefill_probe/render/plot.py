"""The picture of a record: where the memory went, and how close the chunk came."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prefill_probe.record import Held, ProbeRecord
from prefill_probe.render import picture
from prefill_probe.render.picture import ALARM, GREY, INK, MUTED, PALE, PALETTE
from prefill_probe.render.text import flags_text
from prefill_probe.sizes import GIB, MIB, mib, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {
    "weights_bytes": "weights",
    "expert_cache_bytes": "expert cache",
    "kv_pool_bytes": "KV pool",
    "state_pool_bytes": "state pool",
    "graphs_bytes": "CUDA graphs",
    "other_bytes": "other",
}
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 12.5, "fontweight": "bold", "pad": 30}
# Where the bar's own labels begin and end, in widths of the bar.
_LEFT, _RIGHT = -1.2, 3.15
_MARKERS = ("o", "s", "^", "D", "v", "P")
# What the record adds to a shape's name: its size, and how it was run.
_SIZE = re.compile(r"(?:^| of )\d+ tokens")


@dataclass(frozen=True)
class Part:
    """A piece of the bar, from the bottom up. ``kind``: held, transient or free."""

    name: str
    size_bytes: int
    kind: str


@dataclass(frozen=True)
class Point:
    """A peak over idle: measured, predicted, or where memory ran out."""

    shape: str
    tokens: int
    peak_bytes: int
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


def draw(record: ProbeRecord) -> Figure:
    """The bar of memory, and peaks against chunk length beside it.

    Raises:
        PictureError: matplotlib is not installed.
    """
    with picture.drawing(record) as figure:
        _draw_bar(figure.add_axes((0.06, 0.135, 0.42, 0.665)), record)
        _draw_peaks(figure.add_axes((0.56, 0.135, 0.345, 0.665)), record)
        if line := _what_to_do(record):
            figure.text(0.03, 0.025, line, fontsize=10.5, color=INK)
    return figure


# The bar ----------------------------------------------------------------------------------------------------------


def _draw_bar(axes: Axes, record: ProbeRecord) -> None:
    memory, pieces = record.memory, parts(record)
    capacity = memory.free_before_load_bytes
    top = max(capacity, sum(part.size_bytes for part in pieces)) / GIB
    axes.set_title("Where the memory went", **_TITLE)
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
    """How each part is drawn; a component has the same colour in every picture."""
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
    places = picture.spread(list(centres), top * 1.08 * 0.058, top * 1.05)
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


# The peaks --------------------------------------------------------------------------------------------------------


def _draw_peaks(axes: Axes, record: ProbeRecord) -> None:
    found, headroom = points(record), record.memory.headroom_bytes / MIB
    axes.set_title("Peak of one chunk over idle", **_TITLE)
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
    places = picture.spread([level for _, level, _ in levels], top * 0.075, top)
    for (text, _, colour), place in zip(levels, places, strict=True):
        axes.text(right * 1.015, place, text, va="center", fontsize=10, color=colour)
    if not found:
        text = "no chunk came back"
        axes.text(right / 2, headroom / 2, text, ha="center", va="center", fontsize=13, color=MUTED)
        return
    shapes = list(dict.fromkeys(point.shape for point in found))
    for shape, marker, colour in zip(shapes, _MARKERS * 2, (PALETTE[0], *PALETTE[4:]) * 2, strict=False):
        # Shapes of the same size stand side by side.
        aside = shapes.index(shape) * right / 55
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
    for shape, marker, colour in zip(shapes, _MARKERS * 2, (PALETTE[0], *PALETTE[4:]) * 2, strict=False):
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


def _what_to_do(record: ProbeRecord) -> str:
    """The first two values to type next, and whether they were run."""
    known = [line for line in record.advice if line.leaves_bytes is not None][:2]
    texts = []
    for line in known:
        about = "run, leaves" if line.was_run else "not run, leaves about"
        texts.append(f"{flags_text(line)} ({about} {mib(line.leaves_bytes or 0)})")
    first = "To leave the margin:" if record.verdict == "tight" else "Start again with"
    return f"{first}  " + "   or   ".join(texts) if texts else ""
