"""Records to render: two of an earlier version, as measured then, and ones that lack parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from prefill_probe import ProbeRecord
from prefill_probe.record import FaultEntry, Held, MadeOf, Timeline

MIB = 1 << 20
_MEASURED = Path(__file__).parent / "measured"

# Measured on an H200 of which 15.5 GiB were left free: a chunk that does not fit, and one that is tight.
REFUSED = ProbeRecord.from_json((_MEASURED / "refused_8192.json").read_text(encoding="utf-8"))
TIGHT = ProbeRecord.from_json((_MEASURED / "serves_2048.json").read_text(encoding="utf-8"))

HELD = Held(3000 * MIB, 1400 * MIB, 9800 * MIB, 84 * MIB, 87 * MIB, 242 * MIB)
_WATCHED = dataclasses.replace(
    TIGHT.shapes[1],
    made_of=MadeOf({"GDN": 300 * MIB, "MoE": 120 * MIB}, 300 * MIB, "GDN"),
    timeline=Timeline(
        [-1, 0, 0, 1, 1, -1],
        {
            "GDN": [0, 250 * MIB, 300 * MIB, 0, 10 * MIB, 0],
            "MoE": [0, 0, 120 * MIB, 390 * MIB, 0, 0],
            "head": [0, 0, 0, 0, 0, 7 * MIB],
        },
    ),
)
# The tight one as a version writes it that notes where memory went.
WHOLE = dataclasses.replace(
    TIGHT,
    memory=dataclasses.replace(TIGHT.memory, held=HELD),
    shapes=[TIGHT.shapes[0], _WATCHED, *TIGHT.shapes[2:]],
)
NO_NEED = dataclasses.replace(REFUSED, need=None, shapes=REFUSED.shapes[:2], advice=[])
ONE_POINT = dataclasses.replace(TIGHT, shapes=TIGHT.shapes[:1], advice=[])
FAULT = dataclasses.replace(
    REFUSED,
    verdict="fault",
    need=None,
    shapes=[],
    advice=[],
    fault=FaultEntry("time-out", False, False, False, "no result within 300 s"),
)
VIRTUAL = dataclasses.replace(
    WHOLE, device="virtual", shapes=[dataclasses.replace(run, run="virtual", seconds=0.0) for run in WHOLE.shapes]
)
ALL = {
    "refused": REFUSED,
    "tight": TIGHT,
    "whole": WHOLE,
    "no need": NO_NEED,
    "one point": ONE_POINT,
    "fault": FAULT,
    "virtual": VIRTUAL,
}
