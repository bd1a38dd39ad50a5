"""Routers of a dummy model while its chunks are tried: in an engine that was started, and in every architecture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent


def printed(program: str, directory: Path) -> dict[str, Any]:
    pytest.importorskip("freetoken")
    done = subprocess.run(
        [sys.executable, str(HERE / program), str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_routers_are_restored_bit_for_bit_after_a_probe_an_oom_a_fault_and_an_interrupt(tmp_path: Path) -> None:
    found = printed("perturbed.py", tmp_path / "model")
    assert found["verdict"] == "fits"
    assert found["failed"]
    # Four layers, each with weights and a bias, which have contents on this GPU, and had others meanwhile.
    assert (found["routers"], found["tensors"], found["changed"]) == (4, 8, 8)
    assert min(found["distinct"]) > 1
    assert found["restored"] == dict.fromkeys(("a probe", "an OOM", "a fault", "an interrupt"), True)


@pytest.mark.slow
def test_the_router_of_every_moe_layer_of_every_architecture_is_found(tmp_path: Path) -> None:
    found = printed("router_families.py", tmp_path)
    # Not read, for the reasons in docs/families.md.
    assert {name for name, each in found.items() if not isinstance(each, list)} <= {
        "Mistral3ForConditionalGeneration",
        "Gemma4GGUFForCausalLM",
    }
    counts = {name: each for name, each in found.items() if isinstance(each, list)}
    assert {name for name, (layers, routers) in counts.items() if layers != routers} == set(), counts
    assert sum(layers > 0 for layers, _ in counts.values()) >= 13
