"""The picture of a record: where the memory went, and how close the chunk came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefill_probe.record import ProbeRecord
from prefill_probe.render import bar, peaks, picture
from prefill_probe.render.picture import INK
from prefill_probe.render.text import flags_text
from prefill_probe.sizes import mib

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(record: ProbeRecord) -> Figure:
    """The bar of memory, and peaks against chunk length beside it.

    Raises:
        PictureError: matplotlib is not installed.
    """
    with picture.drawing(record) as figure:
        bar.draw(figure.add_axes((0.06, 0.135, 0.42, 0.665)), record)
        peaks.draw(figure.add_axes((0.56, 0.135, 0.345, 0.665)), record)
        if line := _what_to_do(record):
            figure.text(0.03, 0.025, line, fontsize=10.5, color=INK)
    return figure


def _what_to_do(record: ProbeRecord) -> str:
    """The first two values to type next, and whether they were run."""
    known = [line for line in record.advice if line.leaves_bytes is not None][:2]
    texts = []
    for line in known:
        about = "run, leaves" if line.was_run else "not run, leaves about"
        texts.append(f"{flags_text(line)} ({about} {mib(line.leaves_bytes or 0)})")
    first = "To leave the margin:" if record.verdict == "tight" else "Start again with"
    return f"{first}  " + "   or   ".join(texts) if texts else ""
