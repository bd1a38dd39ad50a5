"""A start that is only tried: an engine's command in a child process, followed to the verdict and then ended."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from prefill_probe import stages
from prefill_probe.faults import (
    ERRORS,
    EX_CONFIG,
    EX_SOFTWARE,
    EX_UNAVAILABLE,
    EX_USAGE,
    classify,
    exit_status_of,
)
from prefill_probe.record import ProbeRecord, read_record

# How long the processes of a start may take to end once they are told to, before they are killed.
_GRACE_SECONDS = 10.0
# Lines of the engine's log that are kept to say why it ended.
_LINES = 400


@dataclass(frozen=True)
class Tried:
    """What became of a start.

    Attributes:
        record: of its probe; None if it did not come to one.
        stage: the last that it came to.
        unprobed: why it went on without a probe; empty if it did not.
        exit_status: of the engine, where it ended by itself; negative by signal.
        log: the last lines that it printed.
    """

    record: ProbeRecord | None
    stage: str
    unprobed: str
    exit_status: int | None
    log: tuple[str, ...]

    @property
    def conclusion(self) -> tuple[int, str]:
        """Of a start without a record: the exit status that says what it is, and a text that says why."""
        if self.unprobed:
            return EX_UNAVAILABLE, f"this start is not probed: {self.unprobed}"
        if self.exit_status == EX_USAGE:
            return EX_USAGE, next((line for line in reversed(self.log) if line.strip()), "the engine refuses this")
        for number, line in enumerate(self.log):
            named = _NAMED.search(line)
            if named and (status := exit_status_of(line[named.start() :])) is not None:
                # Its lines are indented, up to the one that says what to do.
                text = "\n".join((line[named.start() :], *self.log[number + 1 : number + 3]))
                # A rank that died without a word of its own: what CUDA or the interpreter printed for it.
                words = [said.strip() for said in self.log[:number] if _LAST_WORDS.search(said)][:_LAST_WORDS_KEPT]
                return status, "\n  the engine printed: ".join((text.rstrip(), *dict.fromkeys(words)))
        where = _WHERE.get(self.stage, "before it loads anything")
        said = next((line.strip() for line in reversed(self.log) if _RAISED.match(line)), "")
        fault = classify(said or "\n".join(self.log), stage=self.stage)
        if fault.is_memory or fault.kind == "planner":
            return EX_CONFIG, f"does not fit: the engine ends {where}: {fault.text}"
        ended = "is ended" if (self.exit_status or 0) < 0 else "ends"
        return EX_SOFTWARE, f"the engine {ended} {where} (status {self.exit_status}): {said or 'it does not say why'}"


_NAMED = re.compile("|".join(f"{error.__name__}:" for error in ERRORS))
# The last line of a traceback.
_RAISED = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b(:|$)")
# Of a process that is ended by a fault: a device-side assertion, the runtime's error, the signal.
_LAST_WORDS = re.compile(r"Assertion `|^\s*what\(\): |CUDA error|^Fatal Python error: ")
_LAST_WORDS_KEPT = 3
_WHERE = {
    stages.LOAD: "while it loads weights",
    stages.CACHES: "while it makes its caches",
    stages.GRAPHS: "while it captures CUDA graphs",
    stages.CHUNK: "during the probe",
}


def try_start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    report: Path,
    ready: str,
    progress: Callable[[str, str], None] = lambda stage, text: None,
    echo: Callable[[str], None] = lambda line: None,
) -> Tried:
    """Run ``command`` until its probe has a verdict or it ends; no process of it is left when this returns.

    Args:
        command: of the engine, with this package's hook installed beside it.
        environment: of the child, besides what is added here.
        report: where the probe of this start writes its record; there is none yet.
        ready: part of a line that the engine prints when it serves: it was not probed then.
        progress: called with each stage, and what is done there.
        echo: called with each line that the engine prints.

    Raises:
        OSError: the command cannot be run.
        RecordError: the probe's record cannot be read.
        KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM; the child is ended first.
    """
    with TemporaryDirectory(prefix="prefill-probe-") as directory:
        told = Path(directory) / "stages"
        with _child(command, {**environment, stages.VARIABLE: str(told)}) as process:
            log: collections.deque[str] = collections.deque(maxlen=_LINES)
            reader = threading.Thread(target=_read, args=(process, log, echo), daemon=True)
            reader.start()
            follower, stage, unprobed = stages.Follower(told), "", ""
            ended = False
            while not ended and not unprobed and stage != stages.VERDICT:
                time.sleep(0.1)
                ended = process.poll() is not None
                for stage, text in follower.new():
                    unprobed = text if stage == stages.UNPROBED else ""
                    progress(stage, text)
                if stage != stages.VERDICT and any(ready in line for line in list(log)):
                    unprobed = unprobed or "its environment has no hook of this package"
            status = process.returncode
        reader.join(_GRACE_SECONDS)
        record = read_record(report) if report.exists() else None
        return Tried(record, stage, unprobed, status, tuple(log))


def _read(process: subprocess.Popen[str], log: collections.deque[str], echo: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        log.append(line.rstrip("\n"))
        echo(log[-1])


@contextlib.contextmanager
def _child(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own, of which nothing is left when the block ends, whatever ends it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)
    finally:
        if main:
            signal.signal(signal.SIGTERM, previous)


def _end(process: subprocess.Popen[str]) -> None:
    for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, _GRACE_SECONDS)):
        for pid in _session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + seconds
        while _session(process.pid) and time.monotonic() < end:
            process.poll()  # a child that nobody waits for stays as a zombie
            time.sleep(0.05)
    process.wait()


def _session(leader: int) -> list[int]:
    """Processes of a session that are not zombies: ranks and tokenizers are, wherever their parent went."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    found.append(int(entry.name))
    return found
