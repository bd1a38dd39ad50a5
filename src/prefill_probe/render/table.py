"""Records of many machines in one table."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import click

from prefill_probe.record import ProbeRecord
from prefill_probe.render.screen import verdict_word
from prefill_probe.sizes import gib, mib

_HEADS = ("record", "GPU", "chunk", "need", "headroom", "verdict")
_GAP = 2
# What a cut name keeps at the least.
_SHORTEST = 8


def table_width() -> int:
    """Columns of the terminal; without end where there is none."""
    return shutil.get_terminal_size((1 << 20, 24)).columns


def table(records: Sequence[tuple[str, ProbeRecord]], width: int) -> str:
    """One row a record, in lines of at most ``width`` columns; where that is too few, one block a record.

    Args:
        records: each with the name by which it is known, a path.
    """
    rows = [_cells(name, record) for name, record in records]
    widths = [max(len(head), *(len(row[i]) for row in rows)) for i, head in enumerate(_HEADS)]
    excess = sum(widths) + _GAP * (len(widths) - 1) - width
    for column in (0, 1):  # names can be cut, numbers cannot
        cut = min(max(0, excess), max(0, widths[column] - _SHORTEST))
        widths[column] -= cut
        excess -= cut
    lines = _blocks(rows) if excess > 0 else _rows(rows, widths)
    if len({record.model.get("architecture") for _, record in records}) > 1:
        lines.append("These are not of the same model: needs cannot be compared.")
    return "\n".join(lines)


def _cells(name: str, record: ProbeRecord) -> list[str]:
    gpu = str(record.gpu.get("name", "?")).replace("NVIDIA ", "").replace("GeForce ", "")
    if record.device == "virtual" and "virtual" not in gpu:
        gpu += " (virtual)"
    gpu += f", {gib(record.memory.total_bytes)}"
    about = "~" if record.need and record.need.estimated else ""
    need = f"{about}{mib(record.need.device_bytes)}" if record.need else "-"
    return [name, gpu, str(record.chunk.effective), need, mib(record.memory.headroom_bytes), record.verdict]


def _rows(rows: Sequence[list[str]], widths: Sequence[int]) -> list[str]:
    lines = [click.style(_line(_HEADS, widths), bold=True)]
    for row in rows:
        line = _line([_end(row[0], widths[0]), _beginning(row[1], widths[1]), *row[2:]], widths)
        lines.append(line[: len(line) - len(row[-1])] + verdict_word(row[-1]))
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names on the left, numbers on the right, the verdict last."""
    texts = [
        f"{cell:>{size}}" if head in ("chunk", "need", "headroom") else f"{cell:<{size}}"
        for head, cell, size in zip(_HEADS, cells, widths, strict=True)
    ]
    return (" " * _GAP).join(texts).rstrip()


def _end(text: str, size: int) -> str:
    """The end of a path says most."""
    return text if len(text) <= size else "…" + text[len(text) - size + 1 :]


def _beginning(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def _blocks(rows: Sequence[list[str]]) -> list[str]:
    lines = []
    for name, gpu, chunk, need, headroom, verdict in rows:
        lines += [name, f"  {verdict_word(verdict)}", f"  {gpu}", f"  chunk    {chunk:>10}"]
        lines += [f"  need     {need:>10}", f"  headroom {headroom:>10}"]
    return lines
