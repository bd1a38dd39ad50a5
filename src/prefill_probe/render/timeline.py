"""The picture of one chunk: live memory over its course, by layer and component."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from prefill_probe.record import ProbeRecord, ShapeRun, Timeline
from prefill_probe.render import picture
from prefill_probe.render.picture import ALARM, GREY, INK, MUTED, PALETTE, PictureError
from prefill_probe.sizes import MIB, mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# So that a component looks the same in every picture; one that is not here takes a colour that is left.
_ORDER = ("GDN", "attention", "MoE", "hyper-connections", "hidden states", "embedding", "head", "sampler", "KDA")
# As many layers as can be named below the picture.
_NAMED_LAYERS = 16


def run_of(record: ProbeRecord) -> ShapeRun:
    """The run whose timeline is drawn: the last that has one.

    Raises:
        PictureError: none has.
    """
    found = [run for run in record.shapes if run.timeline and run.timeline.layers and run.timeline.components]
    if not found:
        raise PictureError("this record has no timeline: it was written by an earlier version, or no chunk was watched")
    return found[-1]


def draw(record: ProbeRecord) -> Figure:
    """Live memory by component over the chunk, with the headroom.

    Raises:
        PictureError: there is nothing to draw, or matplotlib is not installed.
    """
    run = run_of(record)
    assert run.timeline is not None
    text = f"Live memory: {run.name.partition(',')[0]}, {run.new_tokens} tokens"
    if run.cached_tokens:
        text += f" after {run.cached_tokens}"
    with picture.drawing(record) as figure:
        axes = figure.add_axes((0.07, 0.135, 0.66, 0.665))
        axes.set_title(text, loc="left", fontsize=12.5, fontweight="bold", pad=14)
        _draw_layers(axes, run.timeline)
        _draw_components(axes, run.timeline)
        _draw_levels(axes, run, record.memory.headroom_bytes)
    return figure


def totals(timeline: Timeline) -> list[int]:
    """Live bytes at each moment."""
    return [sum(sizes) for sizes in zip(*timeline.components.values(), strict=True)]


def _draw_components(axes: Axes, timeline: Timeline) -> None:
    """The stack, what holds most at the peak at the bottom, and its names beside it in the same order."""
    sums = totals(timeline)
    peak = sums.index(max(sums))
    names = [name for name, sizes in timeline.components.items() if max(sizes) >= max(sums) / 200]
    small = [name for name in timeline.components if name not in names]
    rows = [[size / MIB for size in timeline.components[name]] for name in names]
    if any(max(timeline.components[name]) >= MIB for name in small):
        rest = [sum(timeline.components[name][i] for name in small) for i in range(len(sums))]
        names, rows = [*names, "all others"], [*rows, [size / MIB for size in rest]]
    colours = _colours(names)
    # Each moment is a step of its own width: a stretch, not a point.
    edges = list(range(len(sums) + 1))
    bottom = [0.0] * len(sums)
    for name, row in zip(names, rows, strict=True):
        upper = [low + size for low, size in zip(bottom, row, strict=True)]
        axes.fill_between(
            edges,
            [*bottom, bottom[-1]],
            [*upper, upper[-1]],
            step="post",
            facecolor=colours[name],
            edgecolor="white",
            linewidth=0.3,
        )
        bottom = upper
    centres, low = [], 0.0
    for row in rows:
        centres.append(low + row[peak] / 2)
        low += row[peak]
    axes.set(xlim=(0, len(sums)), ylim=(0, max(sums) / MIB * 1.15), ylabel="MiB over idle")
    top = axes.get_ylim()[1]
    for place, head in ((1.29, "at the peak"), (1.39, "highest")):
        axes.text(place, 1.0, head, transform=axes.transAxes, fontsize=9.5, color=MUTED, va="center", ha="right")
    # Where they are listed is not where they are drawn: the swatches say which is which.
    for place, (name, row) in enumerate(zip(reversed(names), reversed(rows), strict=True)):
        height = 0.93 - 0.062 * place
        axes.text(1.02, height, "■", transform=axes.transAxes, fontsize=15, color=colours[name], va="center")
        axes.text(1.05, height, name, transform=axes.transAxes, va="center", fontsize=10)
        for right, size in ((1.29, row[peak]), (1.39, max(row))):
            axes.text(right, height, f"{size:.0f}", transform=axes.transAxes, va="center", ha="right")
    where = timeline.layers[peak]
    text = f"peak {mib(sums[peak])}" + (f" in layer {where}" if where >= 0 else "")
    side = "left" if peak < len(sums) * 0.7 else "right"
    axes.annotate(
        text,
        (peak + 0.5, sums[peak] / MIB),
        (0, 7),
        textcoords="offset points",
        ha=side,
        fontweight="bold",
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
    axes.plot([peak + 0.5], [sums[peak] / MIB], marker="v", markersize=7, color=INK, clip_on=False)
    axes.set_ylim(0, top)


def _colours(names: Sequence[str]) -> dict[str, str]:
    known = {name: PALETTE[_ORDER.index(name)] for name in names if name in _ORDER}
    left = [colour for colour in PALETTE if colour not in known.values()]
    for name in names:
        if name not in known:
            known[name] = GREY if name in ("other", "all others") or not left else left.pop(0)
    return known


def _draw_layers(axes: Axes, timeline: Timeline) -> None:
    """A line where each layer begins; their numbers below, as far as there is room."""
    spans, start = [], 0
    for layer, moments in groupby(timeline.layers):
        count = len(list(moments))
        spans.append((layer, start, start + count))
        start += count
    every = -(-sum(layer >= 0 for layer, _, _ in spans) // _NAMED_LAYERS) or 1
    places, names = [], []
    for layer, begin, end in spans:
        if begin and len(spans) <= _NAMED_LAYERS + 4:
            axes.axvline(begin, color=MUTED, linewidth=0.4, alpha=0.7)
        if layer < 0:
            first, last = begin == 0, end == len(timeline.layers)
            name = "before" if first else "after" if last else ""
            if end - begin < len(timeline.layers) / 20:
                name = ""  # no room for a word
        else:
            name = str(layer) if layer % every == 0 else ""
        if name:
            places.append((begin + end) / 2)
            names.append(name)
    axes.set_xticks(places, names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("layer (of each as many moments: the highest of equal stretches of its allocations)")


def _draw_levels(axes: Axes, run: ShapeRun, headroom: int) -> None:
    """The headroom, where it is in the picture, and what was asked for when memory ran out."""
    top = axes.get_ylim()[1]
    if run.oom is not None and run.oom.requested_bytes is not None:
        text = f"ran out: {mib(run.oom.requested_bytes)} more were asked for"
        axes.set_title(text, loc="right", fontsize=11, fontweight="bold", color=ALARM, pad=14)
    if headroom / MIB <= 2 * top:
        axes.set_ylim(0, max(top, headroom / MIB * 1.1))
        axes.axhline(headroom / MIB, color=INK, linewidth=1.6)
        axes.text(0, headroom / MIB, f" headroom {mib(headroom)}", va="bottom", fontsize=10)
    else:
        axes.text(0.01, 0.975, f"headroom {mib(headroom)}, far above", transform=axes.transAxes, va="top", fontsize=10)
