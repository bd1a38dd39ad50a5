"""What the acceptance scripts share: a smaller card, a server under test, and the evidence file.

Standard library only on this side; the ballast process uses torch.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
# On PYTHONPATH: starts with dummy weights take less time (see there).
QUICK = str(REPOSITORY / "scripts" / "quick")
EVIDENCE = REPOSITORY / "docs" / "evidence"

# The ballast: holds all but N bytes of the card, and samples free memory while it does.
_BALLAST = r"""
import sys, threading, time, torch
keep = int(sys.argv[1])
torch.cuda.init(); torch.empty(1, device="cuda")
torch.cuda.mem_get_info()
held, taken = [], []
def hold(keep):
    held.clear(); torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    while free > keep + (2 << 20):
        held.append(torch.empty(min(free - keep, 8 << 30) // (2 << 20) * (2 << 20), dtype=torch.uint8, device="cuda"))
        free = torch.cuda.mem_get_info()[0]
if keep > 0:
    hold(keep)
lowest = [torch.cuda.mem_get_info()[0]]
def sample():
    while True:
        lowest[0] = min(lowest[0], torch.cuda.mem_get_info()[0]); time.sleep(0.001)
threading.Thread(target=sample, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "reset":
        lowest[0] = torch.cuda.mem_get_info()[0]
    elif word == "hold":
        hold(int(rest))
    elif word == "take":
        taken.clear(); torch.cuda.empty_cache()
        want = min(int(rest), torch.cuda.mem_get_info()[0] - (4 << 20)) // (2 << 20) * (2 << 20)
        try:
            if want > 0:
                taken.append(torch.empty(want, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
    print(torch.cuda.mem_get_info()[0], lowest[0], flush=True)
"""


class Ballast:
    """A second process on the card. ``visible_bytes`` is what it leaves to others; 0: it holds only its context."""

    def __init__(self, visible_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BALLAST, str(visible_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PREFILL_PROBE": "off"},
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RuntimeError("the ballast process did not start")

    def _ask(self, word: str) -> tuple[int, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        free, lowest = self._process.stdout.readline().split()
        return int(free), int(lowest)

    def hold(self, visible_bytes: int) -> None:
        """From now on leave ``visible_bytes`` to others."""
        self._ask(f"hold {visible_bytes}")

    def take(self, size: int) -> None:
        """Beside what ``hold`` took, ``size`` bytes more from now on, or as much as is free."""
        self._ask(f"take {size}")

    def free(self) -> int:
        """Free bytes on the device now."""
        return self._ask("read")[0]

    def settle(self, seconds: float = 20.0) -> int:
        """Wait until free memory has not risen for two seconds, for what ended gives it back late; returns it."""
        highest, since, end = -1, time.monotonic(), time.monotonic() + seconds
        while time.monotonic() < min(end, since + 2.0):
            if (now := self.free()) > highest:
                highest, since = now, time.monotonic()
            time.sleep(0.25)
        return highest

    def reset(self) -> int:
        """Start to look for the lowest free memory; returns free bytes now."""
        return self._ask("reset")[0]

    def lowest(self) -> int:
        """The lowest free memory, sampled every millisecond, since ``reset``."""
        return self._ask("read")[1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Server:
    """An ``ft serve`` in a process group of its own, on a free port, its log in a list of (seconds, line)."""

    def __init__(self, arguments: list[str], environment: dict[str, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.command = [sys.executable, "-m", "freetoken.cli", "serve", *arguments, "--port", str(self.port)]
        self.started = time.monotonic()
        self.log: list[tuple[float, str]] = []
        self._process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append((time.monotonic() - self.started, line.rstrip("\n")))

    def text(self) -> str:
        """The log so far."""
        return "\n".join(line for _, line in list(self.log))

    def seconds_of(self, pattern: str) -> float | None:
        """Seconds after the start when a line first matched ``pattern``."""
        return next((at for at, line in list(self.log) if re.search(pattern, line)), None)

    def health(self) -> dict[str, Any]:
        """The body of /health; empty while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            with contextlib.suppress(ValueError):
                return dict(json.load(error))
        except OSError:
            pass
        return {}

    def wait(self, seconds: float, *, until_ready: bool) -> str:
        """``"ready"``, ``"ended"`` or ``"late"``, whichever comes first."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                return "ended"
            if until_ready and self.seconds_of("API server is ready to serve") is not None:
                return "ready"
            time.sleep(0.1)
        return "late"

    def generate(self, prompt: str, max_tokens: int, timeout: float = 120) -> dict[str, Any]:
        """One completion: ``ok``, ``seconds`` and the raw text or the error."""
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", body, {"Content-Type": "application/json"}
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read().decode()
            ok = True
        except (OSError, ValueError) as error:
            text, ok = repr(error), False
        return {"ok": ok, "seconds": round(time.monotonic() - began, 3), "text": text[-300:]}

    @property
    def returncode(self) -> int | None:
        """The exit status; negative: by signal; None while it runs."""
        return self._process.poll()

    def children_left(self) -> list[str]:
        """Processes of the server's session that are still there; those that end just now are waited for."""
        end = time.monotonic() + 5
        while True:
            found = subprocess.run(
                ["ps", "-o", "pid=,stat=,args=", "-s", str(self._process.pid)],
                capture_output=True, text=True, check=False,
            ).stdout  # fmt: skip
            left = [line for line in found.splitlines() if line.strip() and " Z" not in line]
            # One without arguments has let go of its memory already: it is on its way out of the kernel.
            if not any(line.rstrip().endswith("]") for line in left) or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def interrupt(self) -> None:
        """SIGINT to every process of the server, as a terminal sends it."""
        os.killpg(self._process.pid, signal.SIGINT)

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL to the group; returns the exit status."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


@contextlib.contextmanager
def server(arguments: list[str], environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that is gone when the block ends."""
    one = Server(arguments, environment)
    try:
        yield one
    finally:
        one.stop()


def prompt_of(tokens: int, seed: int) -> str:
    """A prompt of ``tokens`` tokens of the toy tokenizer, random but always the same for a seed."""
    from prefill_probe.geometry.tokenizer import WORDS, words

    pick = random.Random(seed)
    return words(pick.randrange(WORDS) for _ in range(tokens))


def versions() -> dict[str, Any]:
    """What was measured on what."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("freetoken", "torch", "triton", "transformers", "prefill-probe"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found["gpu"], found["driver"] = [
            part.strip()
            for part in subprocess.run(
                ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split(",")[:2]
        ]
    return found


class Evidence:
    """One evidence file. Each case says when and on what it was run; what it said before that is in ``earlier``."""

    def __init__(self, name: str, about: dict[str, Any], directory: Path | None = None) -> None:
        self.path = (directory or EVIDENCE) / f"{name}.json"
        try:
            self._document = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._document = {"cases": {}}
        self._document |= {"script": " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]]), "about": about}

    def has(self, case: str) -> bool:
        """Whether the file holds ``case`` already."""
        return case in self._document["cases"]

    def case(self, case: str) -> dict[str, Any]:
        """What the file holds of ``case``; empty: nothing."""
        return dict(self._document["cases"].get(case, {}))

    def add(self, case: str, result: dict[str, Any]) -> None:
        """Write the result of ``case``, whatever it is."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.retire(case)
        self._document["cases"][case] = {"date": now, "versions": versions()} | result
        self.write()

    def retire(self, case: str) -> None:
        """Before the next ``add``: ``case`` is of the past, if it is known, as a start that failed and has rows now."""
        if case in self._document["cases"]:
            self._document.setdefault("earlier", []).append({"case": case} | self._document["cases"].pop(case))

    def write(self) -> None:
        """The file as it is now; where things lie on this machine is nobody's business."""
        text = json.dumps(self._document, indent=1) + "\n"
        places = {sys.prefix: "ENVIRONMENT", str(REPOSITORY): "REPOSITORY", sys.base_prefix: "PYTHON"}
        for place, name in (places | {f"{Path.home()}/": "HOME/"}).items():
            text = text.replace(place, name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text, encoding="utf-8")
