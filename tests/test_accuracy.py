"""What docs/accuracy.md says of the evidence, by hand-made numbers; and that the page is that of the evidence."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import accuracy

MIB = 1 << 20


def cell(verdict: str, served: bool, headroom: int = 100, need: int | None = 90, **more: Any) -> dict[str, Any]:
    """A case of a matrix, in MiB."""
    peak = {"allocated_bytes": 80 * MIB, "device_bytes": 100 * MIB}
    truth = {"served": True, "peak": peak} if served else {"served": False, "at": "burst, turn 1"}
    sizes = None if need is None else {"allocated_bytes": need * MIB, "device_bytes": need * MIB, "estimated": False}
    case = {
        "ladder": "a ladder",
        "step": 1.0,
        "chunk": 2048,
        "geometry": "g",
        "visible_gib": 12,
        "margin_bytes": 8 * MIB,
        "ok": True,
    }
    case |= {"verdict": verdict, "headroom_bytes": headroom * MIB, "need": sizes, "truth": truth}
    return case | {"versions": {"freetoken": "0.1.3"}} | more


def rows(*cases: dict[str, Any]) -> list[accuracy.Row]:
    return accuracy.rows_of({"cases": {f"cell {number}": case for number, case in enumerate(cases)}})


@pytest.mark.parametrize(
    ("verdict", "served", "judged"),
    [
        ("fits", True, "right"),
        ("tight", True, "right"),
        ("does-not-fit", False, "right"),
        ("fits", False, "false pass"),
        ("tight", False, "tight, and ran out"),
        ("does-not-fit", True, "false refusal"),
        ("inconclusive", True, "no verdict"),
        ("fault", False, "no verdict"),
    ],
)
def test_a_verdict_is_judged_by_what_the_requests_did(verdict: str, served: bool, judged: str) -> None:
    assert accuracy.judged(rows(cell(verdict, served))[0]) == judged


def test_the_table_counts_every_cell_once() -> None:
    counted = accuracy.confusion(
        rows(
            cell("fits", True),
            cell("fits", True),
            cell("fits", False),
            cell("tight", True),
            cell("does-not-fit", False),
        )
    )
    assert counted["fits"] == (2, 1)
    assert counted["tight"] == (1, 0)
    assert counted["does-not-fit"] == (0, 1)
    assert counted["inconclusive"] == counted["fault"] == (0, 0)


def test_the_boundary_is_what_requests_took_where_there_was_room() -> None:
    room, short, other = rows(
        cell("fits", True, 1000, step=0), cell("does-not-fit", False, 70), cell("fits", True, ladder="another")
    )
    assert (room.off_bytes, short.off_bytes, other.off_bytes) == (900 * MIB, -30 * MIB, None)


def test_the_error_is_of_cells_that_were_served_and_whose_need_was_run() -> None:
    estimated = cell("does-not-fit", True)
    estimated["need"]["estimated"] = True
    found = rows(
        cell("fits", True, need=88), cell("does-not-fit", False, need=5), cell("fits", True, need=None), estimated
    )
    assert accuracy.errors(found, "allocated_bytes") == pytest.approx([0.1])
    assert accuracy.errors(found, "device_bytes") == pytest.approx([-0.12])


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.05, 1.2), (0.5, 3.0), (0.95, 4.8), (1.0, 5.0), (0.3, 2.2)])
def test_percentiles_of_five_numbers(share: float, value: float) -> None:
    assert accuracy.percentile([5, 3, 1, 2, 4], share) == pytest.approx(value)


@given(some.lists(some.floats(-1e6, 1e6), min_size=1), some.floats(0, 1), some.floats(0, 1))
def test_percentiles_lie_within_and_grow_with_the_share(values: list[float], one: float, other: float) -> None:
    low, high = (accuracy.percentile(values, share) for share in sorted((one, other)))
    assert min(values) - 1e-6 <= low <= high + 1e-6 <= max(values) + 2e-6
    assert accuracy.percentile(values, 0.5) == pytest.approx(statistics.median(values), abs=1e-6)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_there_is_no_percentile_of_nothing(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        accuracy.percentile(values, share)


@pytest.mark.parametrize(
    ("headroom", "verdict"), [(89, "does-not-fit"), (90, "tight"), (97, "tight"), (98, "fits"), (1000, "fits")]
)
def test_a_need_from_elsewhere_against_a_headroom(headroom: int, verdict: str) -> None:
    assert accuracy.verdict_of(headroom, 90, 8) == verdict


def test_two_files_are_joined_by_the_name_of_the_cell() -> None:
    real, virtual = rows(cell("fits", True), cell("tight", True)), rows(cell("fits", True))
    assert [(r.name, v.verdict) for r, v in accuracy.joined(real, virtual)] == [("cell 0", "fits")]


def test_a_start_of_its_own_is_compared_with_its_cell_and_not_counted_twice() -> None:
    resized, fresh = cell("tight", True, 97), cell("tight", True, 97, need=92, fresh=True, start_left_bytes=105 * MIB)
    cases = {"one": resized, "one, fresh start": fresh, "another, fresh start": fresh}
    document = {"cases": cases}
    assert [row.name for row in accuracy.rows_of(document)] == ["one"]
    assert accuracy.fresh_pairs(document) == [(resized, fresh)]
    page = accuracy.page_of({"matrix": document})
    assert "1 of these cells were run again" in page
    assert "the allocated need differs by 2.0 MiB at most" in page
    assert "left 8.0 to 8.0 MiB more" in page


def test_what_was_not_measured_is_said_to_be_so() -> None:
    page = accuracy.page_of({})
    assert "Not measured: there is no docs/evidence/matrix.json." in page
    assert "Not measured: it takes both files." in page
    assert page.count(accuracy.UNMEASURED) >= 7


def test_a_disagreement_is_listed_with_its_numbers() -> None:
    cases = {"with room": cell("fits", True, 1000, step=0), "the bad one": cell("fits", False, 97)}
    page = accuracy.page_of({"matrix": {"cases": cases}})
    assert "1 false passes" in page
    assert "| the bad one | false pass | 97.0 | 90.0 | 100.0 | -3.0 | burst, turn 1 | not run |" in page
    cases["the bad one, fresh start"] = cell("tight", True, 97, fresh=True, start_left_bytes=97 * MIB)
    assert "| burst, turn 1 | tight, served |" in accuracy.page_of({"matrix": {"cases": cases}})


def test_the_page_is_that_of_the_evidence() -> None:
    written = accuracy.PAGE.read_text(encoding="utf-8")
    assert written == accuracy.page_of(accuracy.documents_in(accuracy.EVIDENCE)), "run scripts/accuracy.py --write"
