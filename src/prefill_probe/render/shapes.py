"""A record's runs as a table."""

from __future__ import annotations

from prefill_probe.record import ProbeRecord, ShapeRun
from prefill_probe.sizes import mib

_HEADS = ("shape", "prompts", "tokens", "after", "run", "outcome", "allocated", "reserved", "on the device")


def shapes_table(record: ProbeRecord) -> str:
    """One line a run, in order: what was run, how it ended, and its peak over idle by ledger."""
    rows = [_HEADS, *map(_cells, record.shapes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, 4, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cells(run: ShapeRun) -> tuple[str, ...]:
    peak = run.peak
    counts = (run.sequences, run.new_tokens, run.cached_tokens)
    sizes = (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
    return (run.name, *map(str, counts), run.run, run.outcome, *map(mib, sizes))
