"""``ft serve --tp-size 2``: two ranks of the engine, each on a virtual GPU of its own, in lockstep over real gloo."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from machine import server
from test_guard_serve import MIB, Neighbour, completion

from prefill_probe.geometry import make_model

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")


def start(directory: Path, *more: str, **variables: str) -> Any:
    """The engine shards no hybrid model (0.1.2 to 0.2.1: "supports TP=1 only")."""
    model = make_model(directory / "model", "qwen3-30b-a3b-bf16", layers=4)
    site = Path(__file__).parents[1] / "virtual_site"
    environment = {
        "VIRTUAL_VRAM": "15.5GiB",
        "VIRTUAL_NEIGHBOUR": str(directory / "neighbour"),
        "VIRTUAL_NEIGHBOUR_RANK": "1",
        "HF_HUB_OFFLINE": "1",
        "PREFILL_PROBE_REPORT": str(directory / "r.json"),
        "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)]),
    }
    flags = ["--max-running-requests", "2", "--cuda-graph-max-bs", "1", "--dummy-weight", "--tp-size", "2", *more]
    return server(["--model", str(model), *flags], environment | variables)


def record(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "r.json").read_text()))


def test_memory_that_one_rank_lacks_shrinks_and_refuses_chunks_on_both_and_they_go_on(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path / "neighbour")
    with start(tmp_path, "--max-prefill-length", "2048") as one:
        assert one.wait(150, until_ready=True) == "ready", one.text()[-3000:]
        found = record(tmp_path)
        assert found["verdict"] == "fits"
        first, second = found["ranks"]
        assert first["need_bytes"] == second["need_bytes"] > 0
        need, headroom = found["need"]["device_bytes"], found["memory"]["headroom_bytes"]

        neighbour.hold(headroom - 2 * MIB)
        status, _, body = completion(one, 700)
        assert status == 503, body
        assert "not enough GPU memory for a prefill chunk of 64 tokens" in json.dumps(body)

        neighbour.hold(headroom - need + need // 4)
        status, _, body = completion(one, 6000)
        assert status == 200, body
        assert "guard: 2048 tokens wait and" in one.text()

        neighbour.hold(0)
        assert completion(one, 5000)[0] == 200
        assert one.returncode is None


def test_a_chunk_that_one_rank_has_no_memory_for_ends_both_with_78_and_names_it(tmp_path: Path) -> None:
    """Out of memory between two collectives: the other rank waits in the forward, where it will never be met."""
    Neighbour(tmp_path / "neighbour")
    with start(tmp_path, "--max-prefill-length", "16384", VIRTUAL_NEIGHBOUR_TAKES="1300") as one:
        assert one.wait(150, until_ready=False) == "ended", one.text()[-3000:]
        assert one.returncode == 78, one.text()[-3000:]
        assert one.children_left() == []
        text = one.text()
    assert "PrefillOOMError: a full prefill chunk does not fit this GPU" in text
    assert [(rank["rank"], rank["verdict"]) for rank in record(tmp_path)["ranks"]] == [(1, "does-not-fit")]
    assert "rank 1 failed while the others wait" in text
