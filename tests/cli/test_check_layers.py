"""``prefill-probe check --layers``: the first layers on a GPU, all of them in the plan, over a whole ``ft serve``."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prefill_probe.cli import check as module
from prefill_probe.cli import main
from prefill_probe.geometry import make_model
from prefill_probe.sizes import GIB, MIB
from prefill_probe.virtual import here
from prefill_probe.virtual.cards import card_of

SITE = str(Path(__file__).parents[1] / "virtual_site")
pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU of 24 GiB is virtual."""
    monkeypatch.setattr(module, "_need_gpu", lambda: None)
    monkeypatch.setattr(here, "card_here", lambda: card_of(24 * GIB, (12, 0)))
    path = os.pathsep.join([SITE, os.environ.get("PYTHONPATH", "")])
    for name, value in {"VIRTUAL_VRAM": "24GiB", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Flash-Next, all of its 48 layers."""
    return make_model(tmp_path_factory.mktemp("model"), "flash-next-nvfp4")


def checked(model: Path, layers: int, *more: str) -> Result:
    options = ["--layers", str(layers), "--report", str(model / "record.json")]
    return CliRunner().invoke(main, [
        "check", *options, "--", "ft", "serve", "--model", str(model), "--max-running-requests", "1",
        "--cuda-graph-max-bs", "1", "--moe-cache-size", "512", "--disable-moe-prefill-overlap", "--text-model-only",
        "--port", "18933", *more,
    ])  # fmt: skip


def record_of(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "record.json").read_text()))


def test_a(gpu: None, model: Path) -> None:
    for chunk in ("2048", "8192"):
        result = checked(model, 4, "--memory-ratio", "0.95", "--max-prefill-length", chunk)
        print(result.output, result.exception)
        print({k: v for k, v in record_of(model).items() if k != "shapes"})
    assert 0
