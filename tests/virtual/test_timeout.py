"""A chunk that hangs, in a whole ``ft serve`` on a virtual GPU: what a time-out leaves behind, and what it does not.

A time-out always ends the process (``watch.deadline``), so no engine is left to be as before: no process of the start
is left either, and on disk the marker and the record, which the next start goes by.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from machine import server

from prefill_probe import stages
from prefill_probe.geometry import make_model
from prefill_probe.record import ProbeRecord, read_record
from prefill_probe.start import try_start

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")
# A chunk so small that a card at 1,000 tokens a second, which is waited for, is late soon.
ARGUMENTS = [
    "--max-running-requests", "1", "--cuda-graph-max-bs", "1", "--moe-cache-size", "512", "--memory-ratio", "0.95",
    "--disable-moe-prefill-overlap", "--dummy-weight", "--text-model-only", "--max-prefill-length", "256",
    "--prefill-probe-timeout", "3", "--prefill-probe-preflight", "off",
]  # fmt: skip


@dataclass(frozen=True)
class Hung:
    """A start whose first chunk hung, once it has ended."""

    arguments: list[str]
    environment: dict[str, str]
    state: Path
    exit_status: int | None
    left: list[str]
    files: list[str]
    log: str
    record: ProbeRecord


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hung]:
    folder = tmp_path_factory.mktemp("hung")
    model, state = make_model(folder / "model", "flash-next-nvfp4", layers=4), folder / "state"
    site = os.pathsep.join([str(Path(__file__).parents[1] / "virtual_site"), *filter(None, sys.path)])
    environment = {"VIRTUAL_VRAM": "15.5GiB", "PYTHONPATH": site, "HF_HUB_OFFLINE": "1", "STATE_DIRECTORY": str(state)}
    arguments = ["--model", str(model), *ARGUMENTS]
    with server(arguments, {**environment, "VIRTUAL_HANG": str(state)}) as one:
        assert one.wait(150, until_ready=False) == "ended", one.text()[-3000:]
        left, end = one.children_left(), time.monotonic() + 5
        while left and time.monotonic() < end:  # what reads a pipe to its end goes last: multiprocessing's tracker
            time.sleep(0.1)
            left = one.children_left()
        files = sorted(path.name for path in state.iterdir())
        yield Hung(
            arguments, environment, state, one.returncode, left, files, one.text(), read_record(state / "last.json")
        )


def test_the_start_ends_with_70_and_no_process_of_it_is_left(hung: Hung) -> None:
    assert hung.exit_status == 70, hung.log[-3000:]
    assert hung.left == []


def test_the_record_names_the_time_out_and_the_log_the_place(hung: Hung) -> None:
    assert hung.record.verdict == "fault"
    assert hung.record.fault is not None
    assert (hung.record.fault.kind, hung.record.fault.retryable) == ("time-out", False)
    assert [(run.run, run.outcome) for run in hung.record.shapes] == [("cold", "timeout")]
    assert "PrefillTimeoutError: a full prefill chunk did not come back in time." in hung.log
    # The stack of the thread that hangs, down to the engine's own code.
    assert "in hang" in hung.log
    assert "freetoken/scheduler/scheduler.py" in hung.log
    assert "API server is ready to serve" not in hung.log


def test_of_a_hung_probe_the_marker_and_the_record_stay_and_nothing_else(hung: Hung) -> None:
    marker, record = sorted(hung.files, reverse=True)
    assert marker.startswith("unfinished-")
    assert record == "last.json"
    content = json.loads((hung.state / marker).read_text())
    assert not Path(f"/proc/{content['pid']}").exists()


@pytest.mark.slow  # another start; of the marker alone: test_boot.py
def test_the_next_start_does_not_probe_again_and_names_the_marker_also_under_check(hung: Hung) -> None:
    """``check`` perturbs the routers; the configuration is the same."""
    before = (hung.state / "last.json").read_bytes()
    one = try_start(
        [sys.executable, "-m", "freetoken.cli", "serve", *hung.arguments, "--port", "18939"],
        {**os.environ, **hung.environment},
        report=hung.state / "none.json",
        ready="API server is ready to serve",
    )
    assert one.record is None
    assert one.stage != stages.CHUNK
    status, text = one.conclusion
    assert status == 70
    assert "an earlier probe of this configuration never came back" in text
    assert next(name for name in hung.files if name.startswith("unfinished-")) in text
    assert (hung.state / "last.json").read_bytes() == before
