"""What the pictures share: a figure, its colours, and the file that it becomes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefill_probe.record import ProbeRecord, replace_file
from prefill_probe.render.text import one_line, verdict_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg"}
# Colours that people with any colour blindness can tell apart: Paul Tol's "muted" scheme
# (https://personal.sron.nl/~pault/), dark and light in turn. No meaning is carried by colour alone.
PALETTE = ("#332288", "#88CCEE", "#117733", "#DDCC77", "#882255", "#44AA99", "#CC6677", "#999933", "#AA4499")
GREY, PALE, INK, MUTED, ALARM = "#9A9A9A", "#F2F2F2", "#222222", "#666666", "#C1272D"

TITLE: dict[str, Any] = {"loc": "left", "fontsize": 12.5, "fontweight": "bold", "pad": 30}  # of a half of a picture

_STYLE = {
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "hatch.linewidth": 0.8,
    "text.parse_math": False,  # a dollar sign in a path is a dollar sign
    "svg.fonttype": "none",  # text stays text: smaller, and it can be searched
    "svg.hashsalt": "prefill-probe",
}
_INCHES, _DOTS_PER_INCH = (12, 7), 100


class PictureError(ValueError):
    """A picture that cannot be made; the text says why in one line."""


def check_path(path: Path) -> None:
    """See that a picture can be written to ``path``, before anything is drawn.

    Raises:
        PictureError: its suffix is not one of ``FORMATS``, or its directory is not there.
    """
    if path.suffix.lower() not in FORMATS:
        raise PictureError(f"{path}: a picture is a .png or an .svg file")
    if not path.parent.is_dir():
        raise PictureError(f"{path}: there is no directory {path.parent}")


@contextmanager
def drawing(record: ProbeRecord) -> Iterator[Figure]:
    """A figure of 1200 x 700 points, headed by the verdict and what was probed, and the style to draw on it with.

    Raises:
        PictureError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise PictureError("pictures need matplotlib: pip install 'prefill-probe[plot]'") from None
    colour = ALARM if record.verdict in ("does-not-fit", "fault") else INK
    text = _fitted(verdict_text(record), 120)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH)
        figure.text(0.03, 0.945, text, fontsize=min(15, 15 * 80 / len(text)), fontweight="bold", color=colour)
        figure.text(0.03, 0.905, _fitted(what_was_probed(record), 140), fontsize=10.5, color=MUTED)
        yield figure


def what_was_probed(record: ProbeRecord) -> str:
    """Model, GPU, engine and day in one line."""
    model = str(record.model.get("path", "")).rstrip("/").rpartition("/")[2]
    layers = f"{record.model.get('architecture', 'unknown model')}, {record.model.get('layers', '?')} layers"
    gpu = str(record.gpu.get("name", "unknown GPU"))
    if record.device == "virtual" and "virtual" not in gpu:
        gpu += " (virtual)"
    engine = f"{record.engine.get('name', '')} {record.engine.get('version', '')}".strip()
    return " · ".join(part for part in (model, layers, gpu, engine, record.created[:10]) if part)


def write(figure: Figure, path: Path) -> None:
    """Write ``figure`` to ``path``, whole or not at all, readable by all.

    Raises:
        PictureError: it cannot be written.
    """
    import matplotlib as mpl

    kind = FORMATS[path.suffix.lower()]
    content = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
    try:
        replace_file(path, content.getvalue(), mode=0o644)
    except OSError as error:
        raise PictureError(f"{path}: {error.strerror}") from None


def spread(wanted: list[float], least: float, highest: float) -> list[float]:
    """Places from 0 to ``highest`` for labels that want to be at ``wanted`` (ascending), about ``least`` apart."""
    placed = list(wanted)
    for _ in range(500):
        placed[0], placed[-1] = max(0.0, placed[0]), min(highest, placed[-1])
        moved = False
        for i in range(len(placed) - 1):
            overlap = least - (placed[i + 1] - placed[i])
            if overlap > least * 1e-2:
                placed[i] -= overlap / 2
                placed[i + 1] += overlap / 2
                moved = True
        if not moved:
            break
    return placed


def _fitted(text: str, length: int) -> str:
    """``text`` in one line of at most ``length`` characters."""
    text = one_line(text)
    return text if len(text) <= length else text[: length - 1] + "…"
