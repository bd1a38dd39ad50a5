"""The estimate before a whole ``ft serve``, whose driver is played (``tests/virtual_site``)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from preflight_program import FOUND

from engine_hooks.freetoken import preflight
from prefill_probe.geometry import make_model
from prefill_probe.preflight import Prediction

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")
SITE = str(Path(__file__).parents[1] / "virtual_site")
# The published incident.
INCIDENT = [
    "--max-running-requests", "1", "--cuda-graph-max-bs", "1", "--moe-cache-size", "512", "--memory-ratio", "0.95",
    "--disable-moe-prefill-overlap", "--dummy-weight", "--text-model-only", "--port", "18933",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "flash-next-nvfp4", layers=4)


def start(model: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([SITE, *(path for path in sys.path if path)])
    return subprocess.Popen(
        [sys.executable, "-m", "freetoken.cli", "serve", "--model", str(model), *INCIDENT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | environment,
    )


def test_refuse_ends_a_start_that_is_clearly_short_with_78_before_any_rank(model: Path) -> None:
    process = start(model, "--prefill-probe-preflight", "refuse", VIRTUAL_CARD="15.5GiB", VIRTUAL_VRAM="15.5GiB")
    log, _ = process.communicate(timeout=120)
    assert process.returncode == 78, log
    assert "PrefillOOMError: a full prefill chunk will not fit this GPU, by an estimate" in log
    # What this chunk takes of an H200: 1635.5 MiB.
    assert "  needs        about 1.60 GiB   headroom" in log
    assert "core|rank" not in log


def test_warn_says_it_in_a_line_while_the_start_loads_and_it_goes_on(model: Path, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    process = start(
        model, PREFILL_PROBE_PREFLIGHT="warn", VIRTUAL_CARD="15.5GiB", VIRTUAL_VRAM="15.5GiB", VIRTUAL_LOAD=str(loaded)
    )
    assert process.stdout is not None
    said = goes_on = ""
    try:
        for line in process.stdout:
            if "preflight" in line and "ServerArgs" not in line:
                said = line
                loaded.touch()
            if "Free memory before loading model" in line:
                goes_on = line
                break
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert "a prefill chunk of 8192 tokens needs about 1636 MiB, headroom about 5" in said
    assert '"level": "warning"' in said
    assert goes_on


def test_an_estimate_that_hangs_holds_a_start_for_its_time_and_no_longer(model: Path) -> None:
    process = start(model, "--prefill-probe-preflight", "refuse", VIRTUAL_CARD="hangs")
    assert process.stdout is not None
    said = goes_on = ""
    try:
        for line in process.stdout:
            if "no preflight" in line:
                said = line
            if "Default sampling config" in line:  # the server's own first line, right before its ranks
                goes_on = line
                break
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert "it ended without a word (status -9), or took longer than 2 s" in said
    assert goes_on


class Started(list[bool]):
    """In place of ``Child``: whether each that was started is beside the load; its prediction is that of a shortage."""

    def __call__(self, program: str, request: object, *, beside: bool) -> Started:
        self.append(beside)
        return self

    def prediction(self) -> Prediction:
        return FOUND


@pytest.mark.parametrize(
    ("size", "environment", "started", "refused"),
    [
        (1, {}, [True], False),
        (1, {"PREFILL_PROBE_PREFLIGHT": "refuse"}, [False], True),
        (1, {"PREFILL_PROBE_PREFLIGHT": "refuse", "PREFILL_PROBE": "warn"}, [False], True),
        # A smaller chunk or smaller caches, once loaded, are what was asked for.
        (1, {"PREFILL_PROBE_PREFLIGHT": "refuse", "PREFILL_PROBE": "adapt"}, [True], False),
        (1, {"PREFILL_PROBE_PREFLIGHT": "refuse", "PREFILL_PROBE": "off"}, [], False),
        (1, {"PREFILL_PROBE_PREFLIGHT": "off"}, [], False),
        (2, {"PREFILL_PROBE_PREFLIGHT": "refuse"}, [], False),
    ],
)
def test_which_starts_are_estimated_and_which_are_refused(
    size: int, environment: dict[str, str], started: list[bool], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Started()
    monkeypatch.setattr(preflight, "Child", found)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = SimpleNamespace(tp_info=SimpleNamespace(size=size))
    with pytest.raises(SystemExit, match="78") if refused else contextlib.nullcontext():
        preflight.before_start(config, over=lambda: False)
    assert found == started


def test_whatever_fails_the_start_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*arguments: object, **more: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(preflight, "Child", fails)
    preflight.before_start(SimpleNamespace(tp_info=SimpleNamespace(size=1)), over=lambda: False)
    assert "no preflight: OSError: no more processes" in capsys.readouterr().err
