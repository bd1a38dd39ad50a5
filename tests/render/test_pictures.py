"""The pictures: files that are what their names say, with the record's numbers in them."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render.records import ALL, FAULT, MIB, NO_NEED, REFUSED, TIGHT, WHOLE

from prefill_probe import ProbeRecord
from prefill_probe.render import bar, peaks, picture, plot, timeline
from prefill_probe.render.picture import PictureError

pytest.importorskip("matplotlib")


def texts(record: ProbeRecord, path: Path, draw: object = plot.draw) -> list[str]:
    """Every text of the picture, as an SVG."""
    picture.write(draw(record), path)  # type: ignore[operator]
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", ALL)
def test_every_record_makes_a_png_of_1200_by_700(tmp_path: Path, name: str) -> None:
    path = tmp_path / "memory.png"
    picture.write(plot.draw(ALL[name]), path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    assert struct.unpack(">II", content[16:24]) == (1200, 700)
    assert list(tmp_path.iterdir()) == [path]


def test_the_picture_says_the_verdict_where_memory_went_and_how_close_it_was(tmp_path: Path) -> None:
    found = texts(WHOLE, tmp_path / "memory.svg")
    # As measured: need 424 MiB, headroom 515.56 MiB, margin 128 MiB, 16021782528 bytes free before loading.
    heading = "tight: a prefill chunk of 2048 tokens needs 424 MiB, headroom 516 MiB, leaves 92 MiB (margin 128 MiB)"
    assert heading in found
    below = "model · Qwen4ExpForConditionalGeneration, 4 layers · NVIDIA H200 · freetoken 0.1.3 · 2026-12-02"
    assert below in found
    beside = dict(pairwise(found))
    for name, size in {
        "weights": "2.93 GiB", "expert cache": "1.37 GiB", "KV pool": "9.57 GiB", "state pool": "84 MiB",
        "CUDA graphs": "87 MiB", "other": "242 MiB", "transient": "424 MiB", "free": "92 MiB",
        "headroom": "516 MiB", "less margin": "388 MiB", "free before loading": "14.92 GiB (capacity)",
        "--memory-ratio 0.95": "14.18 GiB",
    }.items():  # fmt: skip
        assert beside[name] == size
    assert {"348 MiB", "measured", "predicted", "about 387 MiB"} <= set(found)


def test_measured_predicted_and_failed_sizes_are_told_apart() -> None:
    kinds = {(point.tokens, point.kind) for point in peaks.points(REFUSED)}
    assert kinds == {
        (1024, "measured"), (1280, "predicted"), (2048, "measured"),
        (4096, "ran out"), (8192, "ran out"), (8192, "predicted"),
    }  # fmt: skip


def test_of_a_size_that_was_run_twice_the_last_run_counts() -> None:
    (point,) = [point for point in peaks.points(TIGHT) if point.tokens == 2048]
    assert point.peak_bytes == 444596224  # the cold run took 446693376


def test_parts_that_are_not_known_are_left_out_and_not_made_up(tmp_path: Path) -> None:
    assert [part.name for part in bar.parts(NO_NEED)] == ["in use when idle", "free"]
    found = texts(FAULT, tmp_path / "memory.svg")
    assert "fault: a prefill chunk of 8192 tokens did not come back (time-out)" in found
    assert "no chunk came back" in found
    assert "transient" not in found


def test_the_parts_of_a_chunk_that_fits_add_up_to_what_was_free_before_loading() -> None:
    assert sum(part.size_bytes for part in bar.parts(TIGHT)) == 16021782528


def test_a_model_s_name_is_shown_as_it_is(tmp_path: Path) -> None:
    record = dataclasses.replace(TIGHT, model={**TIGHT.model, "path": "/models/a_{b}$c$<d>"})
    assert any(text.startswith("a_{b}$c$<d> · ") for text in texts(record, tmp_path / "memory.svg"))


def test_the_timeline_names_components_layers_and_the_peak(tmp_path: Path) -> None:
    found = texts(WHOLE, tmp_path / "timeline.svg", timeline.draw)
    assert "Live memory: full chunk, 2048 tokens" in found
    assert "peak 420 MiB in layer 0" in found
    assert {"GDN", "MoE", "head", "headroom 516 MiB", "0", "1"} <= set(found)
    moe = found.index("MoE")
    assert found[moe + 1 : moe + 3] == ["120", "390"]  # at the peak, and at its own highest


def test_a_record_without_a_timeline_says_so() -> None:
    with pytest.raises(PictureError, match="no timeline"):
        timeline.draw(TIGHT)


@pytest.mark.parametrize("name", ["memory.gif", "memory", "memory.png.txt", ".svg"])
def test_only_png_and_svg_are_drawn(tmp_path: Path, name: str) -> None:
    with pytest.raises(PictureError, match=r"a picture is a \.png or an \.svg file$"):
        picture.check_path(tmp_path / name)


def test_a_directory_that_is_missing_or_full_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PictureError, match="there is no directory"):
        picture.check_path(tmp_path / "missing" / "memory.png")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PictureError, match="No space left on device"):
        picture.write(plot.draw(TIGHT), tmp_path / "memory.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plot.draw, timeline.draw):
        with pytest.raises(PictureError, match=r"pip install 'prefill-probe\[plot\]'$"):
            draw(WHOLE)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10).map(sorted))
def test_labels_are_spread_in_their_order(wanted: list[float]) -> None:
    placed = picture.spread(wanted, 5, 100)
    assert all(after - before > 4.5 for before, after in pairwise(placed))
    assert placed[0] > -1
    assert placed[-1] < 101


def test_the_picture_in_the_readme_is_that_of_the_evidence(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    example = docs / "memory.svg"
    cases = json.loads((docs / "evidence" / "incident.json").read_text(encoding="utf-8"))["cases"]
    measured = ProbeRecord.from_json(json.dumps(cases["refused_8192"]["record"]))
    root = ElementTree.parse(example).getroot()
    shown = ["".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sorted(shown) == sorted(texts(measured, tmp_path / "memory.svg"))
    assert example.stat().st_size < 60 * 1024


def test_the_same_record_makes_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        picture.write(plot.draw(WHOLE), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").stat().st_size < 60 * 1024
    assert (tmp_path / "a.svg").stat().st_mode & 0o777 == 0o644


def test_sizes_of_the_timeline_are_summed_as_they_are() -> None:
    run = timeline.run_of(WHOLE)
    assert run.timeline is not None
    assert timeline.totals(run.timeline) == [size * MIB for size in (0, 250, 420, 390, 10, 7)]


def test_the_error_in_the_readme_is_that_of_the_evidence() -> None:
    root = Path(__file__).parents[2]
    cases = json.loads((root / "docs" / "evidence" / "incident.json").read_text(encoding="utf-8"))["cases"]
    shown = "".join(f"    {line}\n" for line in cases["refused_8192"]["error"])
    assert shown in (root / "README.md").read_text(encoding="utf-8")
