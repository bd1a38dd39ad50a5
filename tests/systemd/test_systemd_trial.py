"""The units under a real systemd: what becomes of an engine that a probe stops, and how systemd reads command lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRIAL = Path(__file__).resolve().parents[2] / "scripts" / "systemd-trial"


def test_a_real_systemd_does_with_the_units_what_they_are_for() -> None:
    done = subprocess.run([sys.executable, TRIAL], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 69:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    for found in (
        "an engine that ends with 78: restarted 0 times, failed",
        "its journal has PrefillOOMError",
        "its journal has PrefillInconclusiveError",
        "of a user, an engine that ends with 78: restarted 0 times, failed",
        "command lines are read as systemd reads them",
        "command lines arrive as they were quoted",
        "environments are read as systemd reads them",
    ):
        assert found in done.stdout
