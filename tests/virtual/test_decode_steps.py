"""A probe launches decode steps that the engine's start did not capture: the driver keeps memory for their kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm import document

from prefill_probe.geometry import make_model

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent


def test_a_step_of_more_requests_than_graphs_were_captured_for_is_launched(tmp_path: Path) -> None:
    pytest.importorskip("freetoken")
    model = make_model(tmp_path / "model", "qwen36-35b-a3b-bf16", layers=4)
    assert document(HERE / "decode_steps.py", str(model)) == {"2": [2], "7": [7]}
