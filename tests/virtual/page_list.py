"""The need of a start with a large pool against what requests take of the same virtual GPU.

page_list.py MODEL PAGES CHUNK     One JSON document on standard output. A process of its own.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

TURNS = 3


def main() -> None:
    import torch
    from truth import Clients

    from engine_hooks.freetoken import virtual
    from prefill_probe import ProbeSettings, probe
    from prefill_probe.virtual.cards import card_named

    logging.disable(logging.WARNING)
    model, pages, chunk = sys.argv[1:]
    serve = ["--model", model, "--num-pages", pages, "--max-prefill-length", chunk, "--max-running-requests", "1"]
    serve += ["--cuda-graph-max-bs", "1", "--moe-cache-size", "512", "--dummy-weight", "--text-model-only"]
    with virtual.started([*serve, "--disable-moe-prefill-overlap"], card_named("H200")) as (engine, _):
        record = probe(engine, ProbeSettings())
        idle = engine.meter.read()
        with torch.inference_mode(), engine.meter.measure(idle) as measured:
            clients = Clients(engine._scheduler, engine.limits(), int(chunk))
            for _ in range(TURNS):
                for serve_kind in clients.kinds().values():
                    serve_kind()
    print(json.dumps({"need": asdict(record.need), "seen": asdict(measured.peak)}))


if __name__ == "__main__":
    main()
