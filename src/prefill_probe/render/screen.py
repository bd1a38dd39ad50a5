"""A record as one screen of text: the verdict first, then why, what was run, and what to type next."""

from __future__ import annotations

import shutil
import textwrap

import click

from prefill_probe.record import ProbeRecord, ShapeRun
from prefill_probe.render.text import (
    advice_lines,
    chunk_text,
    error_for,
    failure_text,
    held_by_rows,
    neighbour_rows,
    one_line,
    rank_rows,
    row,
    shape_rows,
)
from prefill_probe.sizes import mib, shown

COLOURS = {"fits": "green", "tight": "yellow", "does-not-fit": "red", "inconclusive": "yellow", "fault": "red"}
# Rows of the table of runs, so that all of it stays one screen.
_MOST_RUNS = 8
_NARROWEST, _WIDEST = 60, 110


def terminal_width() -> int:
    """Columns of the terminal; as wide as lines are readable where there is none."""
    return min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((_WIDEST, 24)).columns))


def verdict_word(verdict: str) -> str:
    """A verdict in its colour; ``click.echo`` takes colours out where they do not belong."""
    return click.style(verdict, fg=COLOURS.get(verdict), bold=True)


def screen(record: ProbeRecord, width: int = _WIDEST) -> str:
    """The record as text, lines of at most ``width`` columns where they can be broken, with terminal colours."""
    blocks = [
        [f"{verdict_word(record.verdict)}   {_sentence(record)}"],
        [*_numbers(record), *_wrapped(_details(record), width)],
        _runs(record),
        _next(record),
        _wrapped([f"note: {one_line(note)}" for note in record.notes], width),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _sentence(record: ProbeRecord) -> str:
    error = error_for(record)
    if error is not None:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if record.verdict == "tight":
        return "a full prefill chunk fits this GPU, but leaves less than the margin."
    return "a full prefill chunk fits this GPU."


def _numbers(record: ProbeRecord) -> list[str]:
    """Chunk, need, headroom and margin, one below the other."""
    memory, need, reduced = record.memory, record.need, record.reduced
    lines = [row("chunk", chunk_text(record))]
    sizes: list[tuple[str, int, str]] = []
    if need is not None:
        of = f"calculated, {need.shape}" if need.estimated else f"run, {need.shape}"
        of += f", {reduced.layers} of {reduced.of} layers" if reduced else ""
        sizes.append(("need", need.device_bytes, of))
    sizes.append(("headroom", memory.headroom_bytes, "after CUDA graphs" + (", estimated" if reduced else "")))
    if need is not None:
        left = memory.headroom_bytes - need.device_bytes
        sizes.append(("leaves" if left >= 0 else "short", abs(left), ""))
    sizes.append(("margin", memory.margin_bytes, "to be left"))
    return lines + [row(label, f"{mib(size):>10}   {text}".rstrip()) for label, size, text in sizes]


def _details(record: ProbeRecord) -> list[str]:
    """What bears on the numbers, each in one row."""
    lines = shape_rows(record)
    if record.fault is not None and record.verdict == "fault":
        lines.append(row("fault", f"{record.fault.kind}: {one_line(record.fault.text)}"))
    if failed := next((run for run in reversed(record.judged) if run.outcome == "oom"), None):
        lines.append(row("failed in", failure_text(failed)))
    lines += held_by_rows(record)
    if held := record.memory.held:
        names = ("weights", "expert_cache", "kv_pool", "state_pool", "graphs", "other")
        found = [(name.replace("_", " ").replace("kv", "KV"), getattr(held, f"{name}_bytes")) for name in names]
        lines.append(row("idle", ", ".join(f"{name} {shown(size)}" for name, size in found if size)))
    lines += rank_rows(record) + neighbour_rows(record)
    if record.adapted is not None:
        flags = " ".join(f"{flag} {value}" for flag, value in record.adapted.get("flags", {}).items())
        lines.append(row("adapted", f"serves with {flags}"))
    model = str(record.model.get("path", "")).rstrip("/").rpartition("/")[2] or "a model"
    gpu = str(record.gpu.get("name", "unknown GPU"))
    virtual = " (virtual)" if record.device == "virtual" and "virtual" not in gpu else ""
    engine = f"{record.engine.get('name', '')} {record.engine.get('version', '')}".strip()
    lines.append(row("probed", f"{model} on {gpu}{virtual} of {shown(record.memory.total_bytes)}, {engine}"))
    lines.append(row("", f"{record.created}, in {record.timings.get('probe_seconds', 0):.1f} s"))
    return lines


def _runs(record: ProbeRecord) -> list[str]:
    """A table of what was run: of every shape and size the last time."""
    last: dict[tuple[str, int, int], ShapeRun] = {}
    for run in record.judged:
        name, _, kept = run.name.partition(",")
        key = (name, run.new_tokens, run.cached_tokens)
        if not kept or key in last:  # what was only run between others, over their leavings, says nothing of itself
            last[key] = run
    rows = sorted(last.items(), key=lambda item: -item[0][1])
    lines = [f"  {'shape':<24} {'tokens':>7} {'after':>7}   {'run':<7} {'outcome':<7} {'peak':>9} {'seconds':>8}"]
    for (name, tokens, cached), run in rows[:_MOST_RUNS]:
        seconds = f"{run.seconds:.2f}" if run.seconds else "-"
        peak = mib(run.peak.device_bytes)
        lines.append(
            f"  {name[:24]:<24} {tokens:>7} {cached:>7}   {run.run:<7} {run.outcome:<7} {peak:>9} {seconds:>8}"
        )
    hidden = len(record.shapes) - len(rows[:_MOST_RUNS])
    if hidden:
        lines.append(f"  ({hidden} more of {len(record.shapes)} runs with --json)")
    return lines if rows else []


def _next(record: ProbeRecord) -> list[str]:
    """What to type next: the advice, or what the named error ends with where there is none."""
    if record.verdict == "does-not-fit":
        return advice_lines(record)
    if record.advice:
        return advice_lines(record)[:-1]  # such a start goes on: there is no check to serve without
    error = error_for(record)
    lines = str(error).splitlines()[1:] if error is not None else []
    return [line for line in lines if not line.startswith("  ")]


def _wrapped(lines: list[str], width: int) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * (15 if line.startswith("  ") else 6),
            break_on_hyphens=False,
            drop_whitespace=True,
            break_long_words=False,
        )
    ]
