"""The versions of FreeToken beside the one that the other tests use, on a virtual GPU, against what was measured."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
import warm
from test_estimate import INCIDENT

from prefill_probe.geometry import make_model
from prefill_probe.sizes import MIB

pytestmark = pytest.mark.engine
WHEELS = Path(__file__).resolve().parents[2] / ".wheels"
# A model, MiB that a chunk of 8192 tokens took of an H200 (allocated), and what else this version is made for. 0.1.2
# knows no Flash-Next.
VERSIONS = {
    "0.1.2": ("qwen36-35b-a3b-nvfp4", 996.3, ()),
    "0.2.0": ("flash-next-nvfp4", 1635.5, ("transformers-5.18", "flashlib-0.4")),
    "0.2.1": ("flash-next-nvfp4", 1635.5, ("transformers-5.18", "flashlib-0.4")),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_full_chunk_takes_what_was_measured(version: str, tmp_path: Path) -> None:
    pytest.importorskip("freetoken")
    geometry, measured, others = VERSIONS[version]
    for name in (f"freetoken-{version}", *others):
        python = "py3" if name in others else f"cp{sys.version_info.major}{sys.version_info.minor}"
        wheel = next(WHEELS.glob(f"{name}*-{python}-*.whl"), None)
        if wheel is None:
            pytest.skip(f"there is no wheel {name} for this Python (scripts/test downloads some)")
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    model = make_model(tmp_path / "model", geometry, layers=4)
    options = ["--vram", "15.5GiB", "--json", "--", "ft", "serve", "--model", str(model), *INCIDENT]
    done = warm.cold(
        ["-m", "prefill_probe", "estimate", *options], {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    )
    assert done.returncode in (0, 78), done.stderr[-2000:]
    record = json.loads(done.stdout)
    assert record["engine"]["version"] == version
    assert record["chunk"]["effective"] == 8192
    assert record["need"]["allocated_bytes"] / MIB == pytest.approx(measured, rel=0.01)
