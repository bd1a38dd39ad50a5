"""Where a start under ``prefill-probe check`` is, told as the engine comes there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from prefill_probe import stages


@contextlib.contextmanager
def told() -> Iterator[None]:
    """While the block runs, the engine's start is followed; without ``check`` nothing is wrapped."""
    if not stages.followed():
        yield
        return
    from freetoken.engine import engine

    def first(stage: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            stages.tell(stage)
            return original(*args, **kwargs)

        return wrapper

    stages.tell(stages.LOAD)
    with (
        mock.patch.object(engine, "_startup_kv_budget", first(stages.CACHES, engine._startup_kv_budget)),
        mock.patch.object(engine, "GraphRunner", first(stages.GRAPHS, engine.GraphRunner)),
    ):
        yield
