"""How many requests the launched decode steps of a probe have, where graphs were captured for up to two.

decode_steps.py MODEL     One JSON document on standard output. A process of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from prefill_probe import Sequence, Shape
from prefill_probe.virtual.cards import card_named

CAPTURED, RUNNING, CHUNK = 2, 8, 1024


def main() -> None:
    from engine_hooks.freetoken import virtual

    logging.disable(logging.WARNING)
    serve = ["--model", sys.argv[1], "--max-prefill-length", str(CHUNK), "--max-running-requests", str(RUNNING)]
    serve += ["--cuda-graph-max-bs", str(CAPTURED), "--num-tokens", "65536", "--moe-cache-size", "512"]
    serve += ["--dummy-weight", "--text-model-only", "--disable-moe-prefill-overlap"]
    launched: dict[int, list[int]] = {}
    with virtual.started(serve, card_named("H200")) as (engine, _):
        model_of = engine._scheduler.engine
        forward = model_of.forward_batch
        sizes: list[int] = []

        def noted(batch: Any, *args: Any) -> Any:
            if batch.is_decode:
                sizes.append(batch.size)
            return forward(batch, *args)

        model_of.forward_batch = noted
        for decodes in (CAPTURED, RUNNING - 1):
            sizes.clear()
            issued = engine.run(Shape("beside", (Sequence(0, CHUNK),), decodes=decodes))
            assert issued.new_tokens == CHUNK
            launched[decodes] = list(sizes)
        del model_of.forward_batch
        engine._scheduler.cache_manager.check_integrity()
    print(json.dumps(launched))


if __name__ == "__main__":
    main()
