"""The Triton kernels through Triton's interpreter; on a GPU: tests/gpu/test_reference_gpu.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    pytest.importorskip("triton")
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(HERE / "moe_on_cpu.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        ("few tokens an expert", 16),
        ("depth and width off the tiles", 32),
        ("many tokens an expert", 64),
        ("one expert gets all", 32),
    ],
)
def test_moe_is_the_loop_over_experts_in_every_tile(cases: dict[str, Any], case: str, rows: int) -> None:
    assert cases[case]["rows"] == rows
    assert cases[case]["error"] < 1e-5


def test_a_decode_step_attends_to_the_pages_of_its_row(cases: dict[str, Any]) -> None:
    assert cases["decode"]["error"] < 1e-5
