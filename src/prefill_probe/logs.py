"""The log: structlog to standard error. On a terminal lines for eyes, elsewhere one JSON object a line for a journal.

A text of several lines (a named error above all) is written in plain lines in both: in a journal too it must be read
by whoever was woken up. There its first line is the JSON object's event, so that it is found.

Nothing global is configured: this code runs inside other people's processes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def get_logger() -> Any:
    """The package's logger. ``PREFILL_PROBE_LOG`` sets its level (debug, info, warning, error; anything else: info)."""
    import structlog

    terminal = sys.stderr.isatty()
    colors = terminal and not os.environ.get("NO_COLOR")
    render: Any = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0) if terminal else _journal_lines
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level_of(os.environ)),
    )


def level_of(environ: Mapping[str, str]) -> int:
    """The level that ``PREFILL_PROBE_LOG`` asks for; info where it says nothing that is known."""
    return LEVELS.get(environ.get("PREFILL_PROBE_LOG", "").strip().lower(), logging.INFO)


def _journal_lines(logger: Any, method: str, event: dict[str, Any]) -> str:
    """A structlog renderer: one JSON object, and below it a text of several lines as it is."""
    from structlog.processors import JSONRenderer

    text = str(event.get("event", ""))
    first, _, more = text.partition("\n")
    line = JSONRenderer(ensure_ascii=False)(
        logger, method, {"timestamp": event.get("timestamp"), "logger": "prefill-probe"} | event | {"event": first}
    )
    return f"{line!s}\n{text}" if more else str(line)
