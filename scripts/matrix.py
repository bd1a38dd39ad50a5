"""Configurations around the boundary, each with its verdict and with real requests (``scripts/acceptance matrix``).

One process (``scripts/truth.py``) starts an engine once and goes through all cells of a start: it resizes the pools,
sets the chunk, and leaves as much of the card as the cell says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import QUICK, REPOSITORY

LAYERS = 4
# A cell's headroom over the need that its ladder's first cell measured, and why there is such a cell.
STEPS = {
    0.9: "a tenth short: refused, and requests run out",
    0.97: "3 % short",
    0.995: "half a percent short: as near as it gets from below",
    1.005: "half a percent more than the need: it fits, with next to nothing left",
    1.03: "3 % more",
    1.1: "a tenth more: tight, or fits where the need is large",
    1.3: "clearly enough",
}
ROOM = "the card has more than the pools leave: the need is measured here, and what requests take"
AGAIN = "the first cell's pools and chunk once more, after all that ran out of memory: nothing of that is left"
# What --fresh runs of each start's first ladder, and beside it whatever disagrees. Explicit pools get such a card.
FRESH_STEPS = (0.97, 1.03)
ROOMY_BYTES = 32 << 30
# Seconds that a start needs, with some cells: none is begun with less.
LEAST_SECONDS = 60.0


@dataclass(frozen=True)
class Start:
    """One engine process. ``expandable``: the allocator's segments are."""

    geometry: str
    running: int
    expandable: bool = True

    @property
    def name(self) -> str:
        """As the evidence names it."""
        return f"{self.geometry}, {self.running} running, segments {'expandable' if self.expandable else 'whole'}"


@dataclass(frozen=True)
class Ladder:
    """Cells that differ in their headroom alone.

    Attributes:
        visible_gib: free before load on the card that the pools are planned for; 0: the pools are explicit.
    """

    start: Start
    chunk: int
    visible_gib: float = 0.0

    @property
    def name(self) -> str:
        """As the evidence names it."""
        pools = f"automatic pools of {self.visible_gib:g} GiB" if self.visible_gib else "explicit pools"
        return f"{self.start.name}, chunk {self.chunk}, {pools}"


@dataclass(frozen=True)
class Cell:
    """One configuration. ``step``: headroom over the ladder's need; 0: with room; -1: with room, once more."""

    ladder: Ladder
    step: float

    @property
    def name(self) -> str:
        """As the evidence names it."""
        return f"{self.ladder.name}, {self.word}"

    @property
    def word(self) -> str:
        """What its headroom is."""
        return {0: "with room", -1: "with room again"}.get(self.step, f"headroom {self.step:g} of the need")

    @property
    def why(self) -> str:
        """What it is there for."""
        return {0: ROOM, -1: AGAIN}.get(self.step) or STEPS[self.step]


# By start: (chunk, GiB that the pools are planned for).
PLAN: dict[Start, tuple[tuple[int, float], ...]] = {
    Start("flash-next-nvfp4", 1): ((8192, 15.5), (2048, 12), (32768, 24), (4096, 0)),
    Start("qwen36-27b-bf16", 4): ((8192, 15.5), (1024, 12), (32768, 0)),
    Start("qwen3-30b-a3b-bf16", 1): ((8192, 12), (32768, 24), (2048, 0)),
    Start("qwen36-35b-a3b-bf16", 4): ((8192, 15.5), (1024, 12), (32768, 32)),
    Start("qwen36-35b-a3b-nvfp4", 1): ((16384, 12), (512, 8), (8192, 0)),
    Start("qwen3-30b-a3b-bf16", 16, expandable=False): ((4096, 15.5), (16384, 32)),
    Start("qwen36-35b-a3b-bf16", 1, expandable=False): ((4096, 24), (16384, 0)),
    Start("qwen36-27b-bf16", 16, expandable=False): ((16384, 24), (2048, 12)),
    Start("qwen36-35b-a3b-nvfp4", 4, expandable=False): ((4096, 8), (8192, 0)),
    Start("flash-next-nvfp4", 16): ((4096, 15.5), (16384, 32), (1024, 0)),
    Start("flash-next-nvfp4", 4, expandable=False): ((8192, 24), (2048, 15.5)),
    Start("qwen36-35b-a3b-nvfp4", 64): ((8192, 15.5), (2048, 12), (32768, 24)),
}
# Of the first start, for a look at one's own card: two ladders.
QUICK_LADDERS = 2


def ladders(chunks: Container[int] | None = None, *, quick: bool = False) -> list[Ladder]:
    """All of them (of these chunks), in the order in which they are run."""
    found = [Ladder(start, chunk, visible) for start, plan in PLAN.items() for chunk, visible in plan]
    chosen = [ladder for ladder in found if chunks is None or ladder.chunk in chunks]
    return chosen[:QUICK_LADDERS] if quick else chosen


def cells_of(ladder: Ladder) -> list[Cell]:
    """The cells of a ladder: with room, then from ample headroom down, and at the end of its start with room again."""
    cells = [Cell(ladder, step) for step in (0, *sorted(STEPS, reverse=True))]
    first = next(iter(PLAN[ladder.start]))
    return [*cells, Cell(ladder, -1)] if (ladder.chunk, ladder.visible_gib) == first else cells


def by_start(chosen: Sequence[Ladder]) -> Iterator[tuple[Start, list[Cell]]]:
    """For each start its cells; the repeated first one comes last."""
    for start in dict.fromkeys(ladder.start for ladder in chosen):
        cells = [cell for ladder in chosen if ladder.start == start for cell in cells_of(ladder)]
        yield start, sorted(cells, key=lambda cell: cell.step == -1)


def left_of(cells: list[Cell], have: Any) -> list[Cell]:
    """Those that are still to run, and of their ladders the one with room, which gives the need."""
    missing = [cell for cell in cells if not have(cell.name)]
    wanted = {cell.ladder for cell in missing}
    return [cell for cell in cells if cell in missing or (cell.step == 0 and cell.ladder in wanted)]


def environment(start: Start, *, virtual: bool) -> dict[str, str]:
    """What a start's process is given beside this one's environment."""
    path = [str(REPOSITORY / "src"), str(REPOSITORY), *([] if virtual else [QUICK]), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PREFILL_PROBE": "off", "HF_HUB_OFFLINE": "1"}
    if not start.expandable:
        settings["PYTORCH_CUDA_ALLOC_CONF"] = settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    return {**os.environ, **settings}


def order_of(cell: Cell) -> dict[str, Any]:
    """A cell as its process is given it."""
    return asdict(cell.ladder) | {"step": cell.step, "name": cell.name, "why": cell.why, "ladder": cell.ladder.name}


def run_start(
    start: Start, cells: list[dict[str, Any]], model: Path, seconds: float, *, virtual: bool, fresh: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one process as they come, as (name, row); one that ends early has a row of its own.

    Args:
        cells: of ``order_of``.
        fresh: it is one cell, and the process is started with its flags.
    """
    order = {"model": str(model), "running": start.running, "virtual": virtual, "seconds": seconds, "cells": cells}
    order |= {"fresh": fresh}
    command = [sys.executable, str(REPOSITORY / "scripts" / "truth.py"), json.dumps(order)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(start, virtual=virtual)
    )
    said: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    errors = process.stderr
    reader = threading.Thread(target=lambda: said.extend(errors), daemon=True)
    reader.start()
    try:
        for line in process.stdout:
            if line.startswith('{"cell"'):
                row = json.loads(line)
                yield row.pop("cell"), row
            else:
                said.append(line)
        if process.wait():
            reader.join(5)
            tail = [line.rstrip("\n") for line in said[-30:]]
            yield start.name, {"ok": False, "exit_status": process.returncode, "log_tail": tail}
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def fresh_order(cell: Cell, row: dict[str, Any]) -> dict[str, Any] | None:
    """``cell`` for a start of its own, on a card whose size leaves the headroom that ``row`` had; None: there is none.

    A ratio leaves a share of what is free before load, so the card differs by more than the headroom did.
    """
    if "truth" not in row or cell.step <= 0:
        return None
    ratio, size = 0.9, ROOMY_BYTES
    if cell.ladder.visible_gib:
        ratio = row["memory_ratio"]
        size = int(cell.ladder.visible_gib * (1 << 30) + row["card_differs_bytes"] / (1 - ratio))
    more = {"pools": row["pools"], "headroom_bytes": row["headroom_bytes"], "memory_ratio": ratio, "free_bytes": size}
    return order_of(cell) | more | {"name": f"{cell.name}, fresh start"}


def disagrees(row: dict[str, Any]) -> bool:
    """Whether requests did what the verdict excludes."""
    return "truth" in row and row["truth"]["served"] != (row["verdict"] in ("fits", "tight"))


def run_fresh(options: Any, evidence: Any) -> int:
    """``scripts/acceptance matrix --fresh``: cells that the file has, each in a start of its own."""
    from prefill_probe.geometry import make_model

    failed, end = 0, time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as directory:
        for start, cells in by_start(ladders()):
            if options.only and options.only not in start.name:
                continue
            for cell in cells:
                row = evidence.case(cell.name)
                wanted = disagrees(row) or (cell.ladder == cells[0].ladder and cell.step in FRESH_STEPS)
                order = fresh_order(cell, row) if wanted else None
                if order is None or (evidence.has(order["name"]) and not options.again) or time.monotonic() > end:
                    continue
                model = make_model(Path(directory) / start.geometry, start.geometry, layers=LAYERS)
                for name, row in run_start(start, [order], model, 600, virtual=options.virtual, fresh=True):
                    failed += not row["ok"]
                    evidence.add(name, row)
                    print(f"{name}: {said(row)}", flush=True)
    return 1 if failed else 0


def run(options: Any, evidence: Any) -> int:
    """``scripts/acceptance matrix``."""
    from prefill_probe.geometry import make_model

    if options.fresh:
        return run_fresh(options, evidence)
    failed, end = 0, time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as directory:
        chunks = {int(chunk) for chunk in options.chunks.split(",")} if options.chunks else None
        for start, cells in by_start(ladders(chunks, quick=options.quick)):
            if options.only and options.only not in start.name:
                continue
            todo = cells if options.again else left_of(cells, evidence.has)
            left = end - time.monotonic()
            if not todo or left < min(LEAST_SECONDS, options.seconds):
                continue
            model = make_model(Path(directory) / start.geometry, start.geometry, layers=LAYERS)
            good = True
            for name, row in run_start(start, [*map(order_of, todo)], model, left, virtual=options.virtual):
                good = good and row["ok"]
                if options.again or not evidence.has(name) or not row["ok"]:
                    evidence.add(name, row)
                print(f"{name}: {said(row)}", flush=True)
            failed += not good
            if good and evidence.has(start.name):
                evidence.add(start.name, {"ok": True, "again": "an earlier process of this start ended early"})
    return 1 if failed else 0


def said(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "verdict" not in row:
        return str(row.get("not_a_start") or row.get("log_tail") or row.get("error"))
    truth = "served" if row["truth"]["served"] else f"out of memory ({row['truth']['at']})"
    return f"{row['verdict']}, {truth}, {row['seconds']} s"
