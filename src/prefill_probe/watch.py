"""The watch over a probe: a deadline that a hung kernel cannot outlast, and a marker that outlives a dead process."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prefill_probe.composition import Frame
from prefill_probe.faults import EX_SOFTWARE

# A card at this pace is slow, not hung.
_SLOW_TOKENS_PER_SECOND = 1000.0
# Runs of a full chunk's size that one probe makes at the most, all sizes taken together.
_FULL_RUNS = 10
# When the deadline's own thread gets no turn (a C call holds the interpreter lock), this much later C code ends it.
_LAST_RESORT_SECONDS = 10.0


def deadline_seconds(timeout_seconds: float, chunk_tokens: int) -> float:
    """How long a probe may take: the timeout, or what a card at 1,000 tokens a second would need if that is more."""
    return max(timeout_seconds, _FULL_RUNS * chunk_tokens / _SLOW_TOKENS_PER_SECOND)


@contextlib.contextmanager
def bounded(seconds: float, report: Callable[[], None], status: int) -> Iterator[None]:
    """End this process with ``status`` if the block does not end within ``seconds``.

    ``report`` is called first (it may log and write the record; what it raises is printed and changes nothing). The
    process ends without cleaning up, since what keeps the block from ending would hang the cleaning up as well.
    """
    ended = threading.Event()

    def wait() -> None:
        if ended.wait(seconds):
            return
        try:
            report()
        except Exception as error:
            print(f"prefill-probe: {error!r}", file=sys.stderr)
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(status)

    thread = threading.Thread(target=wait, name="prefill-probe-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # Or it lets go of what ``report`` holds, an engine, later than anybody else: beside the end of the interpreter.
        thread.join()


@contextlib.contextmanager
def deadline(seconds: float, report: Callable[[], None]) -> Iterator[None]:
    """End this process with status 70 if the block, which a kernel may hang in, does not end within ``seconds``.

    As ``bounded``, and the stacks of all threads go to standard error first. A main thread that is blocked without
    giving up the interpreter lock is ended ten seconds later by faulthandler, which needs no lock, with status 1.
    """

    def stacks_and_report() -> None:
        _dump_stacks()
        report()

    with contextlib.suppress(Exception):  # a standard error without a file descriptor: the thread must do
        faulthandler.dump_traceback_later(seconds + _LAST_RESORT_SECONDS, exit=True)
    try:
        with bounded(seconds, stacks_and_report, EX_SOFTWARE):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def frames_of(thread: int) -> list[Frame]:
    """The stack of a thread (by ``threading.get_ident``), innermost frame first; empty: it is gone."""
    frame = sys._current_frames().get(thread)
    stack = traceback.walk_stack(frame) if frame is not None else ()
    return [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in stack]


def late(seconds: float, place: str, frames: Sequence[Frame]) -> str:
    """What is said of a probe that had no result in time: where it was, and whether that was a compilation, no hang."""
    text = f"no result within {seconds:.0f} s" + (f", in {place}" if place else "")
    if any("/triton/compiler/" in file for file, _, _ in frames):
        text += "; a kernel was being compiled: --prefill-probe-timeout SECONDS gives it longer"
    return text


def _dump_stacks() -> None:
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback(all_threads=True)


def key_of(configuration: dict[str, Any]) -> str:
    """A short name of a configuration, for files that are about it."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Marker:
    """A file that stands while a probe runs, so that the next boot knows of one that never came back.

    Args:
        directory: where markers are kept.
        configuration: what is probed; another configuration has another marker.
    """

    def __init__(self, directory: Path, configuration: dict[str, Any]) -> None:
        self._prefix = f"unfinished-{key_of(configuration)}"
        self._directory = directory
        self.path = directory / f"{self._prefix}-{os.getpid()}.json"

    def left_behind(self) -> Path | None:
        """The marker of an earlier probe of this configuration whose process is gone; None if there is none."""
        try:
            found = sorted(self._directory.glob(f"{self._prefix}-*.json"))
        except OSError:
            return None
        return next((path for path in found if not _alive(path)), None)

    def set(self) -> None:
        """Write the marker and have it on the disk before the first kernel runs.

        Raises:
            OSError: it cannot be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"pid": os.getpid(), "started": _started(os.getpid()), "boot": _boot()})
        temporary = self.path.with_suffix(".new")  # renamed when whole: a boot beside this one may be looking
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(handle, content.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.replace(self.path)

    def clear(self) -> None:
        """Remove the marker; one that is not there is no error."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def marker_of(directory: Path, pid: int) -> Path | None:
    """The marker that the process ``pid``, a child of this one, set; not one of an earlier process of that number."""
    try:
        found = sorted(directory.glob(f"unfinished-*-{pid}.json"))
    except OSError:
        return None
    return next((path for path in found if _younger_than_this_process(path)), None)


def _younger_than_this_process(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return bool(content["boot"] == _boot() and int(content["started"]) >= int(_started(os.getpid()) or 0))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _alive(path: Path) -> bool:
    """Whether the process that wrote a marker still runs (the same process, not one with its number)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        pid, started, boot = int(content["pid"]), content["started"], content["boot"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # torn: whoever wrote it did not get far
    return bool(boot == _boot() and started is not None and started == _started(pid))


def _started(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot, which no clock change moves; None if it is gone."""
    try:
        # The command's name is in parentheses and may hold anything, spaces and parentheses included.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
