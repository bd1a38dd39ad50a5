"""``prefill-probe estimate`` with no command: the reference engine, from the command line to the exit status."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import warm
from click.testing import CliRunner

from prefill_probe import geometry
from prefill_probe.cli import main


def estimate(*arguments: str, python: Any = warm.run) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("fla")
    command = ["-m", "prefill_probe", "estimate", *arguments]
    environment = {**os.environ, "COLUMNS": "110", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return python(command, environment)


def test_a_16_gb_card_gets_a_verdict_a_table_of_shapes_and_advice_that_was_run() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = estimate("--vram", "15.5GiB", python=warm.cold)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 78, done.stderr[-2000:]
    # Of the processor: how long it takes is up to who else is on the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    screen = done.stdout
    assert screen.startswith("does-not-fit   PrefillOOMError: a full prefill chunk does not fit this GPU.")
    # What was run to try advice, with smaller pools, is not in the table: the full chunk fits there.
    assert re.search(r"^  full chunk +8192 +0 +virtual +oom ", screen, re.MULTILINE)
    assert not re.search(r"^  full chunk +8192 +0 +virtual +ok ", screen, re.MULTILINE)
    assert re.search(r"^  4096 tokens +4096 +0 +virtual +ok ", screen, re.MULTILINE)
    assert re.search(
        r"failed in +(gdn|moe|attention) \S+ \(\S+\.py:\d+\), allocating \d+ MiB with \d+ MiB free", screen
    )
    assert "each was run on the virtual GPU before it was printed" in screen
    assert re.search(r"^  --max-prefill-length \d+ +peak \d+ MiB, leaves \d+ MiB", screen, re.MULTILINE)
    assert re.search(r"^  --memory-ratio 0\.\d\d +peak", screen, re.MULTILINE)


def test_the_record_is_one_by_the_schema_and_says_what_was_built(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    (tmp_path / "config.json").write_text(json.dumps(geometry.config("qwen36-35b-a3b-bf16")), encoding="utf-8")
    options = ["--vram", "24GiB", "--max-prefill-length", "2048", "--layers", "8", "--memory-ratio", "0.9"]
    done = estimate(*options, "--model", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(done.stdout)
    schema = json.loads(files("prefill_probe").joinpath("record.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(record, schema)
    assert (record["verdict"], record["device"]) == ("fits", "virtual")
    assert record["model"]["architecture"] == "Qwen3_5MoeForConditionalGeneration"
    assert record["model"]["layers"] == 8
    assert record["flags"]["--memory-ratio"] == 0.9
    assert record["chunk"]["effective"] == 2048
    assert {"full chunk", "deepest chunk", "packed chunk"} <= {run["name"] for run in record["shapes"]}


UNKNOWN = {"architectures": ["GPT2LMHeadModel"], "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such directory"),
        ("{", "is not JSON"),
        (json.dumps(UNKNOWN), "GPT2LMHeadModel"),
        (json.dumps(UNKNOWN | {"architectures": ["Qwen3NextForCausalLM"]}), 'the key "head_dim" is missing'),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    model = str(tmp_path / "none" if content is None else tmp_path)
    result = CliRunner().invoke(main, ["estimate", "--vram", "16GiB", "--model", model])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--vram", "4GiB"), "does not fit: the engine does not start: CUDA out of memory. Tried to allocate"),
        (("--vram", "15.5GiB", "--memory-ratio", "0.3"), "the engine refuses this configuration: no memory for the KV"),
    ],
)
def test_an_engine_that_does_not_start_is_one_line(options: tuple[str, ...], said: str) -> None:
    done = estimate(*options)
    assert done.returncode == 78
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
