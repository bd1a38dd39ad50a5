"""Routers of an engine that is started on a virtual GPU, small enough to have contents: as before, however it ends.

perturbed.py DIRECTORY     One JSON document on standard output. A process of its own: the engine is imported to stay.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from no_trace import fail_at

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import families

SERVE = [*families.SERVE, "--num-tokens", "4096", "--max-prefill-length", "512", "--dummy-weight"]


def contents(engine: Any) -> list[bytes]:
    from engine_hooks.freetoken.routers import routers_of

    tensors = [
        tensor for router in routers_of(engine._scheduler.engine.model) for tensor in (router.weight, *router.biases)
    ]
    return [bytes(tensor.cpu().contiguous().flatten().view(torch.uint8).tolist()) for tensor in tensors]


def main() -> None:
    from engine_hooks.freetoken import virtual
    from prefill_probe import ProbeSettings, probe
    from prefill_probe.shape import full_chunk
    from prefill_probe.virtual.cards import card_of

    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    logging.disable(logging.WARNING)
    small = {"hidden_size": 256, "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 256}
    document = families.document("MiniMaxM2ForCausalLM")
    assert document is not None
    model = families.make_family(Path(sys.argv[1]), document | small)
    found: dict[str, Any] = {"restored": {}}
    with virtual.started(["--model", str(model), *SERVE], card_of(8 << 30, (9, 0))) as (engine, device):
        before = contents(engine)
        found["tensors"] = len(before)
        found["distinct"] = [len(set(each)) for each in before]
        allocate = device.allocate

        def ends_with(what: str, block: Any) -> None:
            with contextlib.suppress(RuntimeError, KeyboardInterrupt), engine.perturbed_routers() as perturbed:
                found.setdefault("routers", perturbed.routers)
                found.setdefault("changed", sum(a != b for a, b in zip(before, contents(engine), strict=True)))
                block()
            found["restored"][what] = contents(engine) == before and not engine.damaged

        def fault() -> None:
            def broken(size: int) -> Any:
                raise RuntimeError("CUDA error: unspecified launch failure")

            device.allocate = broken
            try:
                engine.run(full_chunk(engine.limits()))
            finally:
                device.allocate = allocate

        def interrupted() -> None:
            raise KeyboardInterrupt

        def out_of_memory() -> None:
            found["failed"] = fail_at(engine, full_chunk(engine.limits()), device, allocate, 5)

        ends_with("a probe", lambda: found.update(verdict=probe(engine, ProbeSettings()).verdict))
        ends_with("an OOM", out_of_memory)
        ends_with("a fault", fault)
        ends_with("an interrupt", interrupted)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
