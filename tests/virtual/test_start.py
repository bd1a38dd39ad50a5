"""``prefill-probe check``'s child: a whole ``ft serve``, its ranks on a virtual GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from prefill_probe import stages
from prefill_probe.geometry import make_model
from prefill_probe.start import Tried, try_start

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")
READY = "API server is ready to serve"
# The published incident.
INCIDENT = [
    "--max-running-requests", "1", "--cuda-graph-max-bs", "1", "--moe-cache-size", "512", "--memory-ratio", "0.95",
    "--disable-moe-prefill-overlap", "--dummy-weight", "--text-model-only", "--port", "18931",
]  # fmt: skip
SITE = os.pathsep.join([str(Path(__file__).parents[1] / "virtual_site"), *filter(None, sys.path)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "flash-next-nvfp4", layers=4)


def tried(
    model: Path,
    *more: str,
    found: list[tuple[str, str]],
    echo: Callable[[str], None] = lambda line: None,
    **environment: str,
) -> Tried:
    report = model / "record.json"
    report.unlink(missing_ok=True)
    return try_start(
        [sys.executable, "-m", "freetoken.cli", "serve", "--model", str(model), *INCIDENT, *more],
        {**os.environ, "VIRTUAL_VRAM": "15.5GiB", "PYTHONPATH": SITE, "HF_HUB_OFFLINE": "1"}
        | {"PREFILL_PROBE_REPORT": str(report), **environment},
        report=report,
        ready=READY,
        progress=lambda stage, text: found.append((stage, text)),
        echo=echo,
    )


def left() -> str:
    return subprocess.run(["pgrep", "-f", "freetoken-TP0|18931"], capture_output=True, text=True, check=False).stdout


@dataclass(frozen=True)
class Followed:
    """A start that fits; ``left`` of it are processes after that."""

    tried: Tried
    stages: list[str]
    printed: list[str]
    left: str


@pytest.fixture(scope="module")
def followed(model: Path) -> Followed:
    """One, whose ranks load only once the estimate beside the load is there."""
    loaded = model / "loaded"
    found: list[tuple[str, str]] = []
    printed: list[str] = []

    def echo(line: str) -> None:
        printed.append(line)
        if '"prefill-probe"' in line and "preflight" in line:
            loaded.touch()

    no_longer = threading.Timer(90, loaded.touch)
    no_longer.start()
    try:
        one = tried(
            model,
            "--max-prefill-length",
            "2048",
            found=found,
            echo=echo,
            VIRTUAL_CARD="15.5GiB",
            VIRTUAL_LOAD=str(loaded),
            PREFILL_PROBE_PREFLIGHT="warn",
            XDG_STATE_HOME=str(model),  # it outlives one test, whose state directory is not this
        )
    finally:
        no_longer.cancel()
    return Followed(one, list(dict.fromkeys(stage for stage, _ in found)), printed, left())


def test_a_start_is_followed_to_its_verdict_and_nothing_of_it_is_left(followed: Followed) -> None:
    one = followed.tried
    assert one.record is not None, "\n".join(one.log)
    assert one.record.verdict in ("fits", "tight")
    assert followed.stages == [stages.LOAD, stages.CACHES, stages.GRAPHS, stages.CHUNK, stages.VERDICT]
    assert one.record.perturbed_routers == 4
    # It is ended before it answers anybody.
    assert not any(READY in line for line in one.log)
    assert followed.left == ""


def test_what_is_estimated_of_it_is_said_before_it_loads_and_it_goes_on(followed: Followed) -> None:
    said = [line for line in followed.printed if "preflight (" in line]
    assert len(said) == 1, followed.printed
    assert '"level": "info"' in said[0]
    found = re.search(
        r"a prefill chunk of 2048 tokens needs about (\d+) MiB, headroom about 5\d\d MiB: leaves", said[0]
    )
    assert found is not None, said
    # What this chunk takes of an H200.
    assert int(found[1]) == pytest.approx(434.9, rel=0.01)
    assert "Free memory before loading model" not in "".join(followed.printed[: followed.printed.index(said[0])])
    assert followed.stages[-1] == stages.VERDICT


def test_flags_that_the_engine_refuses_are_its_own_message(model: Path) -> None:
    one = tried(model, "--no-such-flag", found=[])
    assert (one.record, one.exit_status) == (None, 2)
    assert one.conclusion == (2, one.log[-1])
    assert "--no-such-flag" in one.log[-1]


@pytest.mark.slow
def test_a_start_that_has_no_room_for_its_caches_says_how_far_it_came(model: Path) -> None:
    one = tried(model, "--num-tokens", "200000000", found=[])
    assert one.record is None
    assert one.stage == stages.CACHES
    status, text = one.conclusion
    assert status == 78
    assert text.startswith("does not fit: the engine ends while it makes its caches: torch.OutOfMemoryError: CUDA out")
    assert left() == ""


def test_a_start_whose_environment_has_no_hook_is_not_waited_for(tmp_path: Path) -> None:
    code = f"import time; print('INFO {READY} on 127.0.0.1', flush=True); time.sleep(60)"
    one = try_start([sys.executable, "-c", code], os.environ, report=tmp_path / "r", ready=READY)
    assert one.conclusion[0] == 69
    assert "no hook" in one.conclusion[1]


@pytest.mark.parametrize(
    ("log", "status", "says"),
    [
        ((), 70, "does not say why"),
        (("Traceback (most recent call last):", "KeyError: 'rope'"), 70, "KeyError: 'rope'"),
        (("RuntimeError: cache budget too small: 3 pages",), 78, "cache budget too small"),
        (
            ("[core] PrefillFaultError: an earlier probe never came back", "  marker       /state/unfinished-1.json"),
            70,
            "PrefillFaultError: an earlier probe never came back\n  marker",
        ),
        (
            (
                "terminate called after throwing an instance of 'c10::AcceleratorError'",
                "  what():  CUDA error: an illegal memory access was encountered",
                "Fatal Python error: Aborted",
                "[api] PrefillFaultError: the prefill probe ended with status -6 and was not finished; marker: /m",
                "",
            ),
            70,
            "and was not finished; marker: /m\n"
            "  the engine printed: what():  CUDA error: an illegal memory access was encountered\n"
            "  the engine printed: Fatal Python error: Aborted",
        ),
    ],
)
def test_what_a_start_without_a_verdict_ended_by(log: tuple[str, ...], status: int, says: str) -> None:
    found, text = Tried(None, stages.LOAD, "", 1, log).conclusion
    assert found == status
    assert says in text


def test_an_interrupt_ends_every_process_of_the_start(tmp_path: Path) -> None:
    # A shell starts what it runs in the background with interrupts ignored.
    code = """
import os, signal, sys
from pathlib import Path
from prefill_probe.start import try_start
signal.signal(signal.SIGINT, signal.default_int_handler)
child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77)']);"
child += "print(p.pid, flush=True); time.sleep(77)"
try_start(
    [sys.executable, "-c", child], os.environ, report=Path("none"), ready="never",
    echo=lambda line: print(line, flush=True),
)
"""
    for number in (2, 15):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        process.send_signal(number)
        process.communicate(timeout=120)
        assert not Path(f"/proc/{grandchild}").exists() or "Z" in Path(f"/proc/{grandchild}/stat").read_text()
