"""``prefill-probe check --layers``: the first layers on a GPU, all of them in the plan, over a whole ``ft serve``."""

from __future__ import annotations

import json
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prefill_probe import driver
from prefill_probe.cli import check as module
from prefill_probe.cli import main
from prefill_probe.geometry import make_model
from prefill_probe.sizes import GIB
from prefill_probe.virtual.cards import card_of

SITE = str(Path(__file__).parents[1] / "virtual_site")
pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU of 24 GiB is virtual."""
    monkeypatch.setattr(module, "_need_gpu", lambda: None)
    monkeypatch.setattr(driver, "card_here", lambda: card_of(24 * GIB, (12, 0)))
    path = os.pathsep.join([SITE, os.environ.get("PYTHONPATH", "")])
    for name, value in {"VIRTUAL_VRAM": "24GiB", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)


def checked(model: Path, layers: int, *more: str) -> Result:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--layers", str(layers), "--report", str(model / "record.json")]
    return CliRunner().invoke(main, [
        "check", *options, "--", "ft", "serve", "--model", str(model), "--max-running-requests", "1",
        "--cuda-graph-max-bs", "1", "--text-model-only", "--port", port, "--memory-ratio", "0.95", *more,
    ])  # fmt: skip


def record_of(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "record.json").read_text()))


INCIDENT = ["--moe-cache-size", "512", "--disable-moe-prefill-overlap"]


@pytest.mark.slow
def test_a_chunk_that_all_layers_leave_no_room_for_does_not_fit_and_advice_is_not_run(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "flash-next-nvfp4")
    result = checked(model, 4, *INCIDENT, "--max-prefill-length", "8192")
    assert result.exit_code == 78, result.output
    assert "planning for all layers" in result.stderr
    assert "(not run; calculated from" in result.stdout
    record = record_of(model)
    assert record["verdict"] == "does-not-fit"
    assert (record["reduced"]["layers"], record["reduced"]["of"]) == (4, 48)
    assert record["model"]["path"] == str(model)
    # The chunk itself came back: the first layers have room for it. It is the measured one (tests/virtual).
    assert record["need"]["estimated"] is False
    assert record["need"]["allocated_bytes"] / 2**20 == pytest.approx(1635.5, rel=0.01)
    # 12 groups of layers of 718 MB, embeddings and head of 1.2 GiB each, and tables: far more than four layers hold.
    assert record["memory"]["held"]["weights_bytes"] > 8 * GIB
    chunks = [line for line in record["advice"] if set(line["flags"]) == {"--max-prefill-length"}]
    assert chunks
    assert not any(line["was_run"] for line in record["advice"])


@pytest.mark.slow
def test_a_chunk_that_fits_beside_all_layers_fits_and_the_pools_are_those_of_all(tmp_path: Path) -> None:
    """The expert cache is planned by the engine here, for all layers; with fewer it would be another."""
    model = make_model(tmp_path / "model", "qwen36-35b-a3b-nvfp4", layers=12)
    more = ["--moe-cache-auto", "--kv-reserve-tokens", "65536", "--prefill-probe", "off"]
    result = checked(model, 4, "--max-prefill-length", "2048", *more)
    assert result.exit_code == 0, result.output
    record = record_of(model)
    assert (record["verdict"], record["reduced"]["of"], record["advice"]) == ("fits", 12, [])
    assert record["flags"]["--moe-cache-auto"] is True
    assert record["perturbed_routers"] == 4
    assert "--num-pages" not in record["flags"]
    # 12 layers of 256 experts of 1.7 MB; the first four have a third of them.
    assert record["memory"]["held"]["expert_cache_bytes"] > 4.5 * GIB
    left = record["memory"]["headroom_bytes"] - record["need"]["device_bytes"]
    assert left > record["memory"]["margin_bytes"] == 128 << 20


def test_too_few_layers_are_bad_usage_with_the_smallest_number_that_is_not(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen36-35b-a3b-nvfp4", layers=8)
    result = checked(model, 3)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[1:] == [
        "prefill-probe check: --layers 3: of the model's 8 layers the first 4 have every kind; write 4 or more"
    ]
    assert not (model / "record.json").exists()


def test_a_model_without_a_configuration_is_bad_usage_in_one_line(tmp_path: Path) -> None:
    result = checked(tmp_path, 4)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"prefill-probe check: --model {tmp_path}: it has no config.json"


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "status"), [("2048", 0), ("8192", 78)])
@pytest.mark.parametrize("geometry", ["flash-next-nvfp4", "qwen36-35b-a3b-nvfp4"])
def test_both_geometries_at_their_full_depth(tmp_path: Path, geometry: str, chunk: str, status: int) -> None:
    model = make_model(tmp_path / "model", geometry)
    more = [*INCIDENT, "--max-prefill-length", chunk]
    ratio = ["--memory-ratio", "0.97"] if geometry.startswith("qwen") else []
    assert checked(model, 4, *more, *ratio).exit_code == status


@pytest.mark.slow
def test_a_layer_that_is_the_last_and_alone_of_its_kind_is_said(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen36-35b-a3b-nvfp4", layers=4)
    result = checked(model, 3)
    assert result.exit_code == 2
    assert "check it without" in result.stderr.splitlines()[-1]
