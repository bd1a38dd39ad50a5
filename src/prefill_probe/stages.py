"""How far a start under ``prefill-probe check`` is: lines that the hook appends to a file, and the command follows.

``tell`` does nothing unless ``VARIABLE`` names the file, so an ordinary start knows nothing of this.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NoReturn

VARIABLE = "PREFILL_PROBE_STAGES"

# In order. UNPROBED instead of VERDICT: the start went on without a probe, and the text says why.
LOAD, CACHES, GRAPHS, CHUNK, VERDICT = "load", "caches", "graphs", "chunk", "verdict"
UNPROBED = "unprobed"


def followed() -> bool:
    """Whether this process belongs to a start under ``check``."""
    return bool(os.environ.get(VARIABLE))


def tell(stage: str, text: str = "") -> None:
    """Say that this start has come to ``stage``; any process of it may."""
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{stage}\t{' '.join(text.split())}\n")


def hold() -> NoReturn:
    """Wait to be ended: the verdict is known, and this start is not to serve."""
    while True:
        time.sleep(3600)


class Follower:
    """The reading side, in the process of ``check``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> list[tuple[str, str]]:
        """(stage, text) of the lines since the last call; a line that is not whole yet is left for the next."""
        try:
            text = self._path.read_text(encoding="utf-8")[self._read :]
        except OSError:
            return []
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole)
        found = [line.partition("\t") for line in whole.splitlines()]
        return [(stage, rest) for stage, _, rest in found]
