"""What the routers of a chunk choose, seen where the engine hands their choice to the experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefill_probe.engine import Routing

# Class of ``freetoken.layers.moe`` -> the method that a prefill chunk's choice passes through, (hidden, weights, ids).
ENTRANCES = {"MoELayer": "_resident_gemm", "OffloadMoELayer": "_prefill_routed"}


@contextmanager
def observed() -> Iterator[list[Routing]]:
    """While the block runs, count the experts of every prefill MoE call; afterwards the list holds the result.

    The ids of a layer are copied to host memory, so nothing is added to the device's; the copy waits for the layer,
    which makes the chunk a little slower.
    """
    from freetoken.layers import moe

    found: list[Routing] = []
    layers: list[tuple[int, int, int]] = []
    originals = {name: getattr(moe, name).__dict__[method] for name, method in ENTRANCES.items()}

    def counting(original: Any) -> Any:
        def entrance(self: Any, hidden: Any, weights: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
            loads = ids.cpu().flatten().long().bincount()
            layers.append((int(self.num_experts), int((loads > 0).sum()), int(loads.max())))
            return original(self, hidden, weights, ids, *args, **kwargs)

        return entrance

    for name, method in ENTRANCES.items():
        setattr(getattr(moe, name), method, counting(originals[name]))
    try:
        yield found
    finally:
        for name, method in ENTRANCES.items():
            setattr(getattr(moe, name), method, originals[name])
        if layers:
            found.append(Routing(layers[0][0], tuple(each[1] for each in layers), tuple(each[2] for each in layers)))
