"""The transients of chunks at given positions, in one start of FreeToken on a virtual GPU.

depths.py MODEL CHUNK@POSITION ... -- ARGUMENTS OF FT SERVE

Prints one JSON object: "CHUNK@POSITION" -> {"allocated": MiB, "reserved": MiB}, each after a run that is not counted.
A process of its own: the engine is imported to stay.
"""

from __future__ import annotations

import json
import os
import sys

MIB = 1 << 20


def main(model: str, rows: list[str], serve: list[str]) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    from engine_hooks.freetoken.virtual import started
    from prefill_probe.shape import Sequence, Shape
    from prefill_probe.virtual.cards import card_of

    found = {}
    chunks = {row: tuple(map(int, row.split("@"))) for row in rows}
    serve = ["--model", model, *serve, "--max-prefill-length", str(max(chunk for chunk, _ in chunks.values()))]
    with started(serve, card_of(139 << 30, (9, 0))) as (engine, _):
        for row, (chunk, position) in [*list(chunks.items())[:1], *chunks.items()]:
            shape = Shape(row, (Sequence(position, chunk),), restored=position > 0)
            with engine.meter.measure(engine.meter.read()) as measured:
                engine.run(shape)
            peak = measured.peak
            found[row] = {"allocated": peak.allocated_bytes / MIB, "reserved": peak.reserved_bytes / MIB}
    print(json.dumps(found))


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(sys.argv[1], sys.argv[2:split], sys.argv[split + 1 :])
