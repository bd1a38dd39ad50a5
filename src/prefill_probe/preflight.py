"""Preflight: what a start will need and have, estimated in a child process before any weight is read.

The child has a virtual GPU like the real one and builds the engine there, so it can be no process of the engine's. It
can do a start no harm: it ends with this process, when its time is up, or first when the host runs out of memory, and
whatever goes wrong in it is a line in the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from prefill_probe import stages
from prefill_probe.sizes import gib, mib

# A start that waits for it waits no longer. Beside a load it disturbs nobody, but is worth nothing after it.
WAITED_SECONDS = 30.0
BESIDE_SECONDS = 120.0
_NICE = 19


@dataclass(frozen=True)
class Prediction:
    """What is expected of a start.

    Attributes:
        card: the GPU's name.
        free_bytes: on it, before the start.
        total_bytes: of it.
        chunk: new tokens of the full chunk.
        shape: of those that were tried, the one with the largest need.
        need_bytes: what its tensors take at once: no allocator gets by with less.
        headroom_bytes: free after graph capture.
    """

    card: str
    free_bytes: int
    total_bytes: int
    chunk: int
    shape: str
    need_bytes: int
    headroom_bytes: int

    @property
    def short_bytes(self) -> int:
        """What is missing; 0 if nothing is."""
        return max(0, self.need_bytes - self.headroom_bytes)

    @property
    def is_clear(self) -> bool:
        """Whether more than a tenth of the need is missing: more than an estimate is off by."""
        return self.short_bytes > self.need_bytes / 10

    def line(self) -> str:
        """It in one line."""
        left = self.headroom_bytes - self.need_bytes
        return (
            f"preflight (an estimate, nothing was run on this GPU): a prefill chunk of {self.chunk} tokens needs about "
            f"{mib(self.need_bytes)}, headroom about {mib(self.headroom_bytes)}: "
            + (f"short about {mib(-left)}" if left < 0 else f"leaves about {mib(left)}")
        )

    def refusal(self) -> str:
        """Why a start is not begun: the named error's text."""
        return "\n".join(
            (
                "a full prefill chunk will not fit this GPU, by an estimate: nothing was run on it, nor loaded.",
                f"  chunk        {self.chunk} tokens ({self.shape})",
                f"  needs        about {gib(self.need_bytes)}   headroom after CUDA graphs about "
                f"{gib(self.headroom_bytes)}   short about {gib(self.short_bytes)}",
                f"  estimated    for {self.card}, of which {gib(self.free_bytes)} of {gib(self.total_bytes)} are free",
                "To load all the same, and have the chunk run: --prefill-probe-preflight warn",
            )
        )


class Unpredicted(Exception):
    """There is no prediction; the text says why. ``quiet``: nothing to tell a user."""

    def __init__(self, why: str, *, quiet: bool = False) -> None:
        super().__init__(why)
        self.quiet = quiet


# The server's side ---------------------------------------------------------------------------------------------------


class Child:
    """The process that makes the prediction."""

    def __init__(self, program: str, request: object, *, beside: bool) -> None:
        """Start it.

        Args:
            program: a module whose ``main()`` calls ``answer``.
            request: what its ``predict`` is given; pickled, and read once ``sys.path`` is this process's.
            beside: it is not waited for, and gives way to everything else.

        Raises:
            OSError: it cannot be started, or ends before it has the request.
        """
        self._seconds = BESIDE_SECONDS if beside else WAITED_SECONDS
        code = f"import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); import {program} as p; p.main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        try:
            # It stays open: at its end, whatever ends this process, the child ends too.
            self._process.stdin.write(pickle.dumps(sys.path) + pickle.dumps(beside) + pickle.dumps(request))
            self._process.stdin.flush()
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    def prediction(self) -> Prediction:
        """Wait for it.

        Raises:
            Unpredicted: there is none, or not in time; the child is gone.
        """
        late = threading.Event()
        timer = threading.Timer(self._seconds, self._end, (late,))
        timer.daemon = True
        timer.start()
        assert self._process.stdout is not None
        said = self._process.stdout.read().decode("utf-8", "replace").strip()
        status = self._process.wait()
        timer.cancel()
        if not said:
            raise Unpredicted(
                f"it took longer than {self._seconds:.0f} s"
                if late.is_set()
                else f"it ended without a word (status {status})"
            )
        try:
            found = json.loads(said)
            if "why" not in found:
                return Prediction(**found)
        except (ValueError, TypeError):
            raise Unpredicted(f"it ended in the middle of a word (status {status})") from None
        raise Unpredicted(found["why"], quiet=found["quiet"])

    def _end(self, late: threading.Event) -> None:
        late.set()
        self._process.kill()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Of the child: it asks no network, uses one core, is not probed, and tells no stages of its start."""
    kept = {name: value for name, value in environ.items() if name != stages.VARIABLE}
    own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **own, "PREFILL_PROBE": "off"}


# The child's side ----------------------------------------------------------------------------------------------------


def answer(predict: Callable[[Any], Prediction]) -> NoReturn:
    """Read the request, write what ``predict`` makes of it or why it does not, and end this process."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything prints is no answer
    if pickle.load(sys.stdin.buffer):
        _give_way()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        request = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        found = asdict(predict(request))
    except Unpredicted as none:
        found = {"why": str(none), "quiet": none.quiet}
    except BaseException as error:
        found = {"why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "quiet": False}
    out.write(json.dumps(found))
    out.close()
    os._exit(0)  # nothing of the engine's needs to be put away


def _give_way() -> None:
    """Run on a core only while nobody else wants it: even the lowest priority is a share of it."""
    os.nice(_NICE)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
