from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# What stops an architecture, where something does; each is the configuration at hand, not an operator.
STOPPED = {
    # Its configuration is nested in transformers, and flat in what the engine reads.
    "Mistral3ForConditionalGeneration": "has no attribute 'num_attention_heads'",
    # Transformers' defaults are not of a model that was published; the published ones' weights are compressed to sizes
    # that only the weights tell.
    "Glm4MoeForCausalLM": "the engine refuses this configuration",
    # The checkpoint has a second configuration file, of its authors.
    "DeepseekV4ForCausalLM": "inference/config.json",
    # Transformers' defaults leave out what the published models have.
    "Glm5NextForConditionalGeneration": "requires mhc=True",
    "Glm5NextForCausalLM": "requires mhc=True",
}
# Their defaults lack what the engine reads, at any depth.
UNREAD = ("Mistral3ForConditionalGeneration", "DeepseekV4ForCausalLM", "Glm5NextForConditionalGeneration")
WITHOUT_CONFIGURATION = "no configuration in transformers"


def found_by(program: str, directory: Path) -> dict[str, Any]:
    """What a program beside this file prints of each architecture."""
    pytest.importorskip("freetoken")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), str(directory)],
        capture_output=True,
        text=True,
        check=True,
        timeout=580,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_every_registered_architecture_traces_or_is_known_not_to(tmp_path: Path) -> None:
    found = found_by("families.py", tmp_path)
    stopped = {name: text for name, text in found.items() if isinstance(text, str) and text != WITHOUT_CONFIGURATION}
    assert {name for name, text in stopped.items() if STOPPED.get(name, "traced") not in text} == set(), stopped
    assert sum(isinstance(peak, float) for peak in found.values()) >= 12
    assert found["Qwen3_5MoeForConditionalGeneration"] == pytest.approx(996.3, rel=0.01)


def test_every_architecture_that_is_read_is_read_with_its_first_layers_as_they_are(tmp_path: Path) -> None:
    found = found_by("shallow_families.py", tmp_path)
    read = {name: text for name, text in found.items() if not text.startswith("full not read")}
    assert set(found) - set(read) <= {*UNREAD, "Glm5NextForCausalLM"}, found
    assert set(read.values()) == {"as the first 6"}, found
    assert len(read) >= 18
