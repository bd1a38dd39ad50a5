"""The history of the virtual GPU's allocator, in the form of ``torch.cuda.memory``'s trace."""

from __future__ import annotations

import sys
from collections import deque
from types import CodeType
from typing import Any

from prefill_probe.virtual.allocator import Allocator, Block


class History:
    """What was handed out and taken back while it records, with Python stacks, innermost frame first."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._events: deque[dict[str, Any]] = deque()
        # Most frames are the same from one block to the next.
        self._frames: dict[tuple[CodeType, int], dict[str, Any]] = {}

    @property
    def events(self) -> list[dict[str, Any]]:
        """The last ``max_entries`` events, in order."""
        return list(self._events)

    def record(self, enabled: str | None = None, *_: Any, max_entries: int | None = None, **__: Any) -> None:
        """As ``torch.cuda.memory._record_memory_history``: from now on, or (None) no more."""
        self._events = deque(maxlen=max_entries)
        self._allocator.on_event = self._note if enabled else None

    def _note(self, action: str, block: Block) -> None:
        frames = self._stack() if action == "alloc" else []
        self._events.append({"action": action, "addr": block.address, "size": block.requested, "frames": frames})

    def _stack(self) -> list[dict[str, Any]]:
        frames = []
        frame = sys._getframe(2)
        while frame is not None:
            key = (frame.f_code, frame.f_lineno)
            if key not in self._frames:
                file, name = frame.f_code.co_filename, frame.f_code.co_name
                self._frames[key] = {"filename": file, "line": frame.f_lineno, "name": name}
            frames.append(self._frames[key])
            frame = frame.f_back  # type: ignore[assignment]
        return frames
