"""The estimate's text, and its process: whatever becomes of it, the one that started it goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from preflight_program import FOUND

from prefill_probe import preflight
from prefill_probe.preflight import Child, Unpredicted


def child(request: str, *, beside: bool = False) -> Child:
    return Child("preflight_program", request, beside=beside)


def test_a_shortage_in_one_line() -> None:
    assert FOUND.line() == (
        "preflight (an estimate, nothing was run on this GPU): a prefill chunk of 8192 tokens needs about 1640 MiB, "
        "headroom about 552 MiB: short about 1088 MiB"
    )
    assert replace(FOUND, headroom_bytes=2000 << 20).line().endswith("headroom about 2000 MiB: leaves about 360 MiB")


def test_a_refusal_says_that_it_is_an_estimate_and_how_to_go_on() -> None:
    assert FOUND.refusal().splitlines() == [
        "a full prefill chunk will not fit this GPU, by an estimate: nothing was run on it, nor loaded.",
        "  chunk        8192 tokens (full chunk)",
        "  needs        about 1.60 GiB   headroom after CUDA graphs about 0.54 GiB   short about 1.06 GiB",
        "  estimated    for a card, of which 15.00 GiB of 16.00 GiB are free",
        "To load all the same, and have the chunk run: --prefill-probe-preflight warn",
    ]


@pytest.mark.parametrize(("headroom", "clear"), [(1640, False), (1476, False), (1475, True), (2000, False)])
def test_a_shortage_is_clear_above_a_tenth_of_the_need(headroom: int, clear: bool) -> None:
    assert replace(FOUND, headroom_bytes=headroom << 20).is_clear is clear


@pytest.mark.parametrize("beside", [True, False])
def test_what_the_child_finds_comes_back_whatever_else_it_prints(beside: bool) -> None:
    assert child("beside" if beside else "awaited", beside=beside).prediction() == FOUND


@pytest.mark.parametrize(
    ("request_", "says", "quiet"),
    [
        ("fails", "RuntimeError: an engine that fails", False),
        ("dies", "it ended without a word (status -9)", False),
        ("babbles", "ended in the middle of a word (status 3)", False),
        ("no gpu", "no CUDA GPU answers", True),
    ],
)
def test_a_child_that_finds_nothing_says_why(request_: str, says: str, quiet: bool) -> None:
    with pytest.raises(Unpredicted) as caught:
        child(request_).prediction()
    assert says in str(caught.value)
    assert caught.value.quiet is quiet


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "WAITED_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(Unpredicted, match="took longer than 1 s"):
        child("hangs").prediction()
    assert time.monotonic() - began < 10


def test_a_program_that_is_not_there_is_one_of_these_too() -> None:
    with pytest.raises((Unpredicted, OSError)):
        Child("no_such_program", "", beside=False).prediction()


def test_it_asks_no_network_and_tells_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFILL_PROBE_STAGES", "/tmp/stages")
    environment = preflight._environment(os.environ)
    assert "PREFILL_PROBE_STAGES" not in environment
    assert (environment["HF_HUB_OFFLINE"], environment["PREFILL_PROBE"]) == ("1", "off")


def test_the_child_ends_with_the_process_that_started_it_even_if_that_is_killed() -> None:
    code = (
        "import time; from prefill_probe.preflight import Child; "
        "c = Child('preflight_program', 'hangs', beside=True); print(c._process.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while _lives(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
