"""``adapt`` and ``adapt-kv``: a start goes on with a value that was run, instead of ending."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefill_probe._probe import Keep, probe
from prefill_probe._walk import Progress
from prefill_probe.engine import Engine, PlanRefused
from prefill_probe.record import Advice, ProbeRecord, replace_file
from prefill_probe.settings import Mode, ProbeSettings

Flags = dict[str, Any]
CHUNK = "--max-prefill-length"


@dataclass(frozen=True)
class Adopted:
    """What an earlier start of a configuration went on with: the flags, and the shape that proved them."""

    flags: Flags
    word: str


class Memory:
    """The file in which a start finds what the last one of its configuration adopted.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Adopted | None:
        """What was adopted; None if nothing was, or the file cannot be read as that."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            flags = {str(flag): value for flag, value in found["flags"].items() if isinstance(value, int | float)}
            return Adopted(flags, str(found["word"])) if flags else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, adopted: Adopted) -> None:
        """Note what was adopted; a directory that cannot be written costs the next start its shortcut, no more."""
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps({"flags": adopted.flags, "word": adopted.word}) + "\n")


def choose(advice: Sequence[Advice], mode: Mode) -> Flags | None:
    """The first values of ``advice`` that were run and that ``mode`` may adopt; None if there are none.

    ``adapt`` lowers the chunk and touches no pool; ``adapt-kv`` shrinks pools and keeps the chunk.
    """
    for line in advice:
        only_chunk = set(line.flags) == {CHUNK}
        if line.was_run and (only_chunk if mode is Mode.ADAPT else CHUNK not in line.flags):
            return dict(line.flags)
    return None


def adapted_probe(
    engine: Engine,
    settings: ProbeSettings,
    memory: Memory,
    progress: Progress = lambda text: None,
    keep: Keep = lambda record: None,
) -> ProbeRecord:
    """``probe``, and what follows from it in ``settings.mode``: the engine goes on with what was run and fits.

    What the last start of this configuration adopted is adopted at once and confirmed by one run; only if that does
    not leave the margin is everything run again. The record's ``adapted`` says what was adopted; it is None if
    nothing had to be or could be.

    Raises:
        as ``probe``.
    """
    was = {CHUNK: engine.limits().budget, "--memory-ratio": engine.budget().memory_ratio}
    remembered = engine.gather(memory.read() if engine.rank == 0 else None)[0]
    if remembered is not None and _fitting(remembered.flags, settings.mode) and _adopt(engine, remembered.flags):
        record = probe(engine, settings, progress, keep, once=remembered.word)
        if record.verdict == "fits":
            return replace(record, adapted=_said(settings.mode, remembered.flags, was, confirmed=True))
        progress(f"what the last start adopted leaves too little now ({record.verdict}); probing all over")
        _undo(engine, was)
    record = probe(engine, settings, progress, keep)
    flags = choose(record.advice, settings.mode) if record.verdict == "does-not-fit" else None
    if flags is None or not _adopt(engine, flags):
        return record
    if engine.rank == 0:
        memory.write(Adopted(flags, _word_of(record)))
    return replace(record, adapted=_said(settings.mode, flags, was, confirmed=False))


def _fitting(flags: Flags, mode: Mode) -> bool:
    return (set(flags) == {CHUNK}) if mode is Mode.ADAPT else CHUNK not in flags


def _adopt(engine: Engine, flags: Flags) -> bool:
    """Whether the engine took ``flags``, on every rank."""
    try:
        if CHUNK in flags:
            engine.adopt_chunk(int(flags[CHUNK]))
        else:
            engine.resize(flags)
        taken = True
    except PlanRefused:
        taken = False
    return all(engine.gather(taken))


def _undo(engine: Engine, was: Mapping[str, Any]) -> None:
    engine.adopt_chunk(int(was[CHUNK]))
    engine.resize({})


def _said(mode: Mode, flags: Flags, was: Mapping[str, Any], *, confirmed: bool) -> dict[str, Any]:
    return {
        "mode": mode.value,
        "flags": flags,
        "was": {flag: was[flag] for flag in flags if was.get(flag) is not None},
        "confirmed_from_an_earlier_start": confirmed,
    }


def _word_of(record: ProbeRecord) -> str:
    from prefill_probe.shape import FAMILIES

    name = record.need.shape if record.need else ""
    return next((family.word for family in FAMILIES if family.name == name), "full")


def adapted_text(record: ProbeRecord, argv: Sequence[str], quote: Callable[[str], str] = shlex.quote) -> str:
    """One warning: what was adopted instead of what, and the command line that makes it permanent."""
    assert record.adapted is not None
    flags, was = record.adapted["flags"], record.adapted["was"]
    changes = ", ".join(f"{flag} {was.get(flag, 'as given')} -> {value}" for flag, value in flags.items())
    text = f"adapted, because a full prefill chunk does not fit this GPU: {changes}"
    if record.adapted["confirmed_from_an_earlier_start"]:
        text = f"adapted, as at the last start: {changes}"
    return f"{text}. To make it permanent: {' '.join(map(quote, permanent(argv, flags)))}"


def permanent(argv: Sequence[str], flags: Flags) -> list[str]:
    """``argv`` with ``flags`` set, in place of what it says of them."""
    arguments: list[str] = []
    skip = False
    for argument in argv:
        if skip:
            skip = False
            continue
        name, _, value = argument.partition("=")
        if name in flags:
            skip = not value
            continue
        arguments.append(argument)
    return arguments + [part for flag, value in flags.items() for part in (flag, str(value))]
