"""Three cells of the acceptance matrix on a virtual GPU: fits, runs out, and once more with nothing left of that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from prefill_probe.geometry import make_model

pytestmark = pytest.mark.engine
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

START = "qwen3-30b-a3b-bf16"
CHUNK = 1024


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[float, dict[str, Any]]:
    pytest.importorskip("freetoken")
    import matrix

    model = make_model(tmp_path_factory.mktemp("model"), START, layers=2)
    start = matrix.Start(START, 2)
    cells = [matrix.Cell(matrix.Ladder(start, CHUNK, 8), step) for step in (0, 0.9, -1)]
    found = dict(matrix.run_start(start, [*map(matrix.order_of, cells)], model, 300, virtual=True))
    assert list(found) == [cell.name for cell in cells], found
    return {cell.step: found[cell.name] for cell in cells}


def test_with_room_the_requests_take_what_the_probe_needed(rows: dict[float, dict[str, Any]]) -> None:
    room = rows[0]
    assert (room["verdict"], room["truth"]["served"]) == ("fits", True)
    # Of 60 MiB; beside them are lists of pages, by the pool's size and by what is cached.
    assert room["truth"]["peak"]["allocated_bytes"] == pytest.approx(room["need"]["allocated_bytes"], rel=0.05)
    assert room["shortcuts"]["128 tokens"]["allocated_bytes"] < room["need"]["allocated_bytes"]


def test_served_requests_leave_no_second_list_of_free_pages(rows: dict[float, dict[str, Any]]) -> None:
    """The probe's engine lives on in the guard; what it noted of the list at the start does not."""
    list_bytes = 4 * rows[0]["pools"]["num_pages"]
    assert list_bytes > 1 << 20
    assert rows[0]["truth"]["kept_bytes"] < list_bytes / 2


def test_with_nine_tenths_of_the_need_probe_and_requests_run_out_of_memory(rows: dict[float, dict[str, Any]]) -> None:
    short = rows[0.9]
    wanted = 0.9 * rows[0]["need"]["device_bytes"]
    assert 0 <= short["headroom_bytes"] - wanted < 2 << 20  # another process takes pages of 2 MiB
    assert (short["verdict"], short["truth"]["served"]) == ("does-not-fit", False)
    assert short["truth"]["at"] == "long prompt, turn 1"
    assert short["truth"]["site"]


def test_after_that_the_engine_holds_and_needs_what_it_did(rows: dict[float, dict[str, Any]]) -> None:
    again = rows[-1]
    assert again["as_before"]
    assert again["truth"]["served"]
    assert again["need"]["allocated_bytes"] == rows[0]["need"]["allocated_bytes"]
