"""When each layer of a chunk begins and ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prefill_probe.composition import Mark


@contextmanager
def watched(layers: Sequence[Any], count: Callable[[], int], method: str = "forward") -> Iterator[list[Mark]]:
    """While the block runs, note ``count()`` as each layer's ``method`` begins (by number) and ends (-1)."""
    marks: list[Mark] = []

    def marking(number: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            marks.append((count(), number))
            try:
                return original(*args, **kwargs)
            finally:
                marks.append((count(), -1))

        return marked

    for number, layer in enumerate(layers):
        setattr(layer, method, marking(number, getattr(layer, method)))
    try:
        yield marks
    finally:
        for layer in layers:
            delattr(layer, method)  # the instance's; its class has the real one
