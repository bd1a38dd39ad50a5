"""When each layer of a chunk begins and ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefill_probe.composition import Mark


def decoder_layers(model: Any) -> list[Any]:
    """The model's layers in order; empty where they are not kept in a list of the engine's own kind."""
    inner = getattr(model, "model", model)
    return list(getattr(getattr(inner, "layers", None), "op_list", ()))


@contextmanager
def watched(layers: list[Any], count: Callable[[], int]) -> Iterator[list[Mark]]:
    """While the block runs, note ``count()`` as each layer's ``forward`` begins (by number) and ends (-1)."""
    marks: list[Mark] = []

    def marking(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            marks.append((count(), number))
            try:
                return forward(*args, **kwargs)
            finally:
                marks.append((count(), -1))

        return marked

    for number, layer in enumerate(layers):
        layer.forward = marking(number, layer.forward)
    try:
        yield marks
    finally:
        for layer in layers:
            del layer.forward  # the instance's; its class has the real one
