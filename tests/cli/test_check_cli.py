"""``prefill-probe check`` from the command line to the exit status, over a whole ``ft serve`` on a virtual GPU."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefill_probe.cli import check as module
from prefill_probe.cli import main
from prefill_probe.geometry import make_model

SITE = os.pathsep.join([str(Path(__file__).parents[1] / "virtual_site"), *filter(None, sys.path)])
needs_engine = pytest.mark.skipif(
    find_spec("freetoken") is None, reason="FreeToken is not installed in this environment"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose GPU is virtual; gives a model's directory."""
    monkeypatch.setattr(module, "_need_gpu", lambda: None)
    for name, value in {"VIRTUAL_VRAM": "15.5GiB", "PYTHONPATH": SITE, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    return make_model(tmp_path / "a model", "flash-next-nvfp4", layers=4)


def serve(model: Path, *more: str) -> list[str]:
    return [
        "--", "ft", "serve", "--model", str(model), "--max-running-requests", "1", "--cuda-graph-max-bs", "1",
        "--moe-cache-size", "512", "--disable-moe-prefill-overlap", "--text-model-only", "--port", "18932", *more,
    ]  # fmt: skip


@needs_engine
def test_what_is_deployed_is_checked_whatever_its_own_probe_is_set_to(
    gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off in the deployed command line, a preflight that refuses, a record and metrics of its own, a smaller margin."""
    monkeypatch.setenv("VIRTUAL_CARD", "15.5GiB")
    deployed = ["--max-prefill-length", "8192", "--prefill-probe", "off", "--prefill-probe-margin", "1MiB"]
    deployed += ["--prefill-probe-preflight", "refuse"]
    more = [*deployed, "--prefill-probe-report", str(tmp_path / "deployed.json")]
    more += ["--prefill-probe-metrics", str(tmp_path / "deployed.prom")]
    here = ["--no-weights", "--margin", "256MiB", "--memory-ratio", "0.95", "--report", str(tmp_path / "r.json")]
    result = CliRunner().invoke(main, ["check", *here, *serve(gpu, *more)])
    assert result.exit_code == 78, result.output
    assert result.stdout.startswith("does-not-fit   PrefillOOMError: a full prefill chunk does not fit this GPU.")
    assert [line.split("  ")[-1] for line in result.stderr.splitlines()] == [
        "loading weights", "making caches", "capturing CUDA graphs", "running chunks", "done",
    ]  # fmt: skip
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["memory"]["margin_bytes"] == 256 << 20
    assert record["flags"]["--memory-ratio"] == 0.95
    assert record["perturbed_routers"] == 4
    assert not (tmp_path / "deployed.json").exists()
    assert not (tmp_path / "deployed.prom").exists()


@pytest.mark.slow
@needs_engine
def test_a_unit_is_checked_with_its_own_environment(gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.env").write_text("CHUNK=2048\n")
    ft = shutil.which("ft", path=str(Path(sys.executable).parent))
    words = " ".join(f'"{word}"' for word in serve(gpu)[2:])
    (tmp_path / "engine.service").write_text(
        f"[Service]\nEnvironment=PREFILL_PROBE=warn\nEnvironmentFile={tmp_path}/engine.env\n"
        f"ExecStart={ft} {words} \\\n  --max-prefill-length $CHUNK --memory-ratio 0.90 --dummy-weight\n"
    )
    result = CliRunner().invoke(main, ["check", "--json", "--unit", "engine.service"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["verdict"], record["chunk"]["requested"]) == ("fits", 2048)
    assert record["memory"]["held"]["weights_bytes"] > 0


@needs_engine
def test_what_the_engine_refuses_is_its_own_message_and_status(gpu: Path) -> None:
    result = CliRunner().invoke(main, ["check", *serve(gpu, "--memory-ratio", "much")])
    assert result.exit_code == 2
    assert "argument --memory-ratio: invalid float value: 'much'" in result.stderr.splitlines()[-1]


def test_without_a_gpu_it_says_so_before_anything_is_started() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    for arguments in (["check"], ["check", "--", "ft", "serve", "--model", "on/hub"]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 69
        assert result.stderr.splitlines() == [
            "prefill-probe check: no CUDA GPU answers on this machine; `prefill-probe estimate` needs none"
        ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "vllm", "serve", "x"], "not vllm serve"),
        (["--", "ft", "serve", "--port", "1"], "add --model DIR"),
        (["--", "ft", "chat"], "not ft chat"),
        (["--no-weights"], "--no-weights"),
        (["--layers", "0", "--", "ft", "serve", "--model", "x"], "'--layers'"),
        (["--", "ft", "serve", "--model", "/none"], "--model /none: no such directory"),
        (["--", "ft", "serve", "--model=/none"], "--model /none: no such directory"),
        (["--layers", "4", "--", "ft", "serve", "--model", "on/hub"], "give a directory"),
        (["--margin", "128", "--", "ft", "serve", "--model", "x"], "write a number with a unit"),
        (["--timeout", "0"], "'--timeout'"),
        (["--unit", "none.service"], "none.service"),
    ],
)
def test_bad_usage_is_one_line_and_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["check", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr.splitlines()[-1]
