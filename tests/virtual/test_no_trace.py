"""The real scheduler on a virtual GPU is as before a probe, and as before an OOM, wherever that happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm import document

from prefill_probe.geometry import make_model

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent


def test_every_shape_runs_and_neither_a_probe_nor_an_oom_at_ten_places_leaves_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("freetoken")
    model = make_model(tmp_path / "model", "flash-next-nvfp4", layers=4)
    found = document(HERE / "no_trace.py", str(model))
    assert found["verdict"] == "fits"
    assert not any("not run" in note for note in found["notes"])
    # name, prompts, cached tokens
    ran = {run[0]: run[1:3] for run in found["runs"]}
    assert ran["full chunk"] == ran["first chunk"] == ran["chunk beside decodes"] == [1, 0]
    assert ran["packed chunk"] == [4, 0]
    assert ran["chunk after a prefix hit"] == [1, 1024]
    assert ran["deepest chunk"][1] > 250_000
    assert {word: len(places) for word, places in found["places"].items()} == {"deep": 10, "packed": 10}
    assert all(failed for places in found["places"].values() for _, failed in places)
    assert {where: changed for where, changed in found["changed"].items() if changed} == {}
