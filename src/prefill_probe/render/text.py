"""A record as text: the named error, and one line for the log."""

from __future__ import annotations

from typing import Any

from prefill_probe.faults import (
    PrefillFaultError,
    PrefillInconclusiveError,
    PrefillOOMError,
    PrefillProbeError,
    PrefillTimeoutError,
)
from prefill_probe.record import Advice, ProbeRecord, ShapeRun
from prefill_probe.sizes import MIB, gib, mib


def error_for(record: ProbeRecord) -> PrefillProbeError | None:
    """The named error of a record whose verdict stops a start; None for one that lets it go on."""
    if record.verdict == "does-not-fit":
        return PrefillOOMError(oom_text(record))
    if record.verdict == "inconclusive":
        return PrefillInconclusiveError(inconclusive_text(record))
    if record.verdict == "fault":
        kind = PrefillTimeoutError if record.fault and record.fault.kind == "time-out" else PrefillFaultError
        return kind(fault_text(record))
    return None


def log_line(record: ProbeRecord) -> str:
    """The verdict in one line, with what else bears on it."""
    notes = "".join(f"; {one_line(note)}" for note in record.notes) if record.need is not None else ""
    took = f" ({record.timings.get('probe_seconds', 0):.1f} s)" if record.need is not None else ""
    return verdict_text(record) + notes + took


def one_line(text: str) -> str:
    """``text`` without its line breaks."""
    return " ".join(text.split())


def verdict_text(record: ProbeRecord) -> str:
    """The verdict and its numbers, in one line."""
    chunk = f"a prefill chunk of {record.chunk.effective} tokens"
    if record.need is None:
        kind = f" ({record.fault.kind})" if record.verdict == "fault" and record.fault else ""
        return f"{record.verdict}: {chunk} did not come back{kind}"
    about = "about " if record.need.estimated else ""
    headroom, need = record.memory.headroom_bytes, record.need.device_bytes
    line = f"{record.verdict}: {chunk} needs {about}{mib(need)}, headroom {mib(headroom)}"
    if record.verdict in ("fits", "tight"):
        line += f", leaves {mib(headroom - need)}"
    if record.verdict == "does-not-fit" and need > headroom:
        line += f", short {about}{mib(need - headroom)}"
    if record.verdict == "tight":
        line += f" (margin {mib(record.memory.margin_bytes)})"
    return line


def oom_text(record: ProbeRecord) -> str:
    """What does not fit, how much is missing, where it failed, and what to type next; one screen."""
    headroom = record.memory.headroom_bytes
    lines = ["a full prefill chunk does not fit this GPU.", row("chunk", chunk_text(record))]
    if record.need is not None:
        about = "about " if record.need.estimated else ""
        need = record.need.device_bytes
        lines.append(
            row(
                "needs",
                f"{about}{gib(need)}   headroom after CUDA graphs {gib(headroom)}   "
                f"short {about}{gib(max(0, need - headroom))}",
            )
        )
    else:
        lines.append(row("needs", f"more than the headroom after CUDA graphs, {gib(headroom)}; no chunk came back"))
    lines += shape_rows(record)
    if failed := next((run for run in reversed(record.judged) if run.outcome == "oom"), None):
        lines.append(row("failed in", failure_text(failed)))
    lines += held_by_rows(record)
    lines += rank_rows(record)
    lines += neighbour_rows(record)
    lines += [row("note", one_line(note)) for note in record.notes]
    lines += advice_lines(record)
    return "\n".join(lines)


def inconclusive_text(record: ProbeRecord) -> str:
    """What disturbed the measurement, and who holds memory."""
    lines = ["the measurement of a full prefill chunk was disturbed; try again.", row("chunk", chunk_text(record))]
    lines += [row("because", one_line(note)) for note in record.notes]
    lines += neighbour_rows(record)
    return "\n".join(lines)


def fault_text(record: ProbeRecord) -> str:
    """A fault that is not a memory shortage: what, where, whether to try again."""
    kind = record.fault.kind if record.fault else "unknown"
    first = {
        "time-out": "a full prefill chunk did not come back in time.",
        "unknown": "a full prefill chunk failed, for a reason that is not known.",
    }.get(kind, "a full prefill chunk failed, and not for lack of GPU memory.")
    lines = [first, row("chunk", chunk_text(record))]
    if record.fault is not None:
        lines.append(row("fault", f"{record.fault.kind}: {record.fault.text}"))
    lines += shape_rows(record)
    failed = _faulty(record)
    if failed is not None and failed.oom is not None and failed.oom.site:
        lines.append(row("failed in", failed.oom.site))
    lines += rank_rows(record)
    lines += [row("note", one_line(note)) for note in record.notes]
    if record.fault is not None and record.fault.chunk_helps:
        lines.append("A smaller --max-prefill-length avoids it; a --memory-ratio does not.")
    if kind == "kernel-fault":
        lines.append("A GPU reports this late: a start with CUDA_LAUNCH_BLOCKING=1 in its environment says where.")
    lines.append("To serve without this check: --prefill-probe off")
    return "\n".join(lines)


def row(label: str, text: str) -> str:
    return f"  {label:<12} {text}"


def chunk_text(record: ProbeRecord) -> str:
    chunk = record.chunk
    given = f"--max-prefill-length {chunk.requested}"
    capped = f", capped by {chunk.capped_by}" if chunk.capped_by else ""
    return f"{chunk.effective} tokens ({given}{capped})"


def shape_rows(record: ProbeRecord) -> list[str]:
    """What the chunk was made of, where it is not simply a prompt: of the need, or the one that ended in a fault."""
    run = _faulty(record)
    if run is None:
        name = record.need.shape if record.need else "full chunk"
        run = next((run for run in reversed(record.judged) if run.name == name), None)
    if run is None or (run.sequences == 1 and not run.cached_tokens):
        return []
    many = f"{run.name}: {run.sequences} prompts"
    return [row("shape", many if run.sequences > 1 else f"{run.name}: after {run.cached_tokens} tokens")]


def _faulty(record: ProbeRecord) -> ShapeRun | None:
    return next((run for run in reversed(record.judged) if run.outcome == "fault"), None)


def held_by_rows(record: ProbeRecord) -> list[str]:
    """The components that held most at the peak, or when it failed."""
    made = next((run.made_of for run in reversed(record.judged) if run.made_of), None)
    if made is None:
        return []
    largest = [f"{name} {mib(size)}" for name, size in made.components.items() if size >= MIB]
    return [row("held by", ", ".join(largest[:4]))] if largest else []


def failure_text(run: ShapeRun) -> str:
    assert run.oom is not None
    text = run.oom.site or "an unknown place"
    if run.oom.requested_bytes is not None:
        text += f", allocating {mib(run.oom.requested_bytes)}"
    if run.oom.free_bytes is not None:
        text += f" with {mib(run.oom.free_bytes)} free"
    if run.oom.requested_bytes == 256 << 20 and run.run == "cold":
        text += " (cold Triton cache)"
    return text


def advice_lines(record: ProbeRecord) -> list[str]:
    ran = [line for line in record.advice if line.was_run]
    calculated = [line for line in record.advice if not line.was_run and line.peak_bytes is not None]
    refused = [line for line in record.advice if line.peak_bytes is None and line.reason]
    others = [line for line in record.advice if line.peak_bytes is None and not line.reason]
    lines: list[str] = []
    untried: list[Advice] = []
    if ran:
        where = "the virtual" if record.device == "virtual" else "this"
        lines.append(f"Start again with one of these (each was run on {where} GPU before it was printed):")
        lines += _table(ran, "")
        untried = calculated
    elif calculated:
        lines.append(f"Start again with one of these (not run; calculated from {_measured(record)}):")
        lines += _table(calculated, "about ")
    elif any(run.outcome == "ok" for run in record.shapes):
        lines.append("No value of one flag alone leaves enough memory; a smaller model or a larger GPU does.")
    else:
        smallest = min((run.new_tokens for run in record.shapes), default=record.chunk.effective)
        lines.append(
            f"Not even a chunk of {smallest} tokens came back: lower --memory-ratio, or free memory on this GPU."
        )
    lines += [
        f"Not run: {flags_text(line)} (peak about {mib(line.peak_bytes or 0)}): {line.reason}" for line in untried
    ]
    lines += [f"Does not help: {flags_text(line)}: {line.reason}" for line in refused]
    if others:
        lines.append("Also possible, not run: " + "; ".join(f"{flags_text(line)} ({line.cost})" for line in others))
    lines.append("To serve all the same: --prefill-probe warn (prompts are then cut into chunks that fit)")
    return lines


def rank_rows(record: ProbeRecord) -> list[str]:
    """The ranks that the verdict is about, where there are several."""
    worst = [f"rank {rank.rank}" for rank in record.ranks if rank.verdict == record.verdict]
    return [row("on", ", ".join(worst))] if len(record.ranks) > 1 else []


def neighbour_rows(record: ProbeRecord) -> list[str]:
    return [
        row("also on it", f"process {neighbour.pid} holds {mib(neighbour.bytes)}")
        for neighbour in sorted(record.neighbours or [], key=lambda each: -each.bytes)[:3]
    ]


def _measured(record: ProbeRecord) -> str:
    # What was run over the leavings of others says nothing of its own size.
    runs = [run for run in record.judged if run.outcome == "ok" and "nothing handed back" not in run.name]
    peaks = {run.new_tokens: run.peak.device_bytes for run in runs}
    return ", ".join(f"{tokens} tokens: {mib(peak)}" for tokens, peak in sorted(peaks.items()))


def flags_text(line: Advice) -> str:
    def shown(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    return " ".join(f"{flag} {shown(value)}".strip() for flag, value in line.flags.items())


def _table(advice: list[Advice], about: str) -> list[str]:
    """One line each: the flags, the peak under them, what they leave, and what they cost."""
    columns = [
        (
            flags_text(line),
            f"peak {about}{mib(line.peak_bytes or 0)}, leaves {about}{mib(line.leaves_bytes or 0)}",
            line.cost,
        )
        for line in advice
    ]
    flags, leaves = (max(len(row[column]) for row in columns) for column in (0, 1))
    return [f"  {row[0]:<{flags}}   {row[1]:<{leaves}}   {row[2]}".rstrip() for row in columns]
