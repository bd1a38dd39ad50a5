"""Draws docs/memory.svg: ``prefill-probe show --plot`` of the case refused_8192 of docs/evidence/incident.json."""

from __future__ import annotations

import json
from pathlib import Path

from prefill_probe.record import ProbeRecord
from prefill_probe.render import picture, plot

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    cases = json.loads((DOCS / "evidence" / "incident.json").read_text(encoding="utf-8"))["cases"]
    picture.write(plot.draw(ProbeRecord.from_json(json.dumps(cases["refused_8192"]["record"]))), DOCS / "memory.svg")


if __name__ == "__main__":
    main()
