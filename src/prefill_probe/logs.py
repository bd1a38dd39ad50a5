"""The log: structlog to standard error, in lines that a person reads, also in a journal.

Nothing global is configured: this code runs inside other people's processes.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any


def get_logger() -> Any:
    """The package's logger. ``PREFILL_PROBE_LOG`` sets its level (debug, info, warning, error; default info)."""
    import structlog

    level = getattr(logging, os.environ.get("PREFILL_PROBE_LOG", "").upper(), logging.INFO)
    colors = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
