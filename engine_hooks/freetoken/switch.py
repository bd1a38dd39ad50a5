"""Whether the hook is switched off in this environment: a file below its prefix, which ``prefill-probe hook`` makes."""

from __future__ import annotations

import sys
from pathlib import Path

SWITCHED_OFF = "switched off in this environment; `prefill-probe hook enable` switches it on"


def file() -> Path:
    """The file that switches the hook off."""
    return Path(sys.prefix) / "share" / "prefill-probe" / "hook-disabled"


def is_off() -> bool:
    """Whether it is there."""
    return file().exists()
