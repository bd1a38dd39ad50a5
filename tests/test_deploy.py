"""What docs/deploy.md says to write: the shell script is run, the YAML is read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "deploy.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("status", "ran", "ends"), [(0, "ft serve", 0), (75, "scontrol requeue 7", 0), (78, "", 78)])
def test_the_batch_script_acts_on_the_status(tmp_path: Path, status: int, ran: str, ends: int) -> None:
    for name, body in (("ft", 'echo "ft $1"'), ("scontrol", 'echo "scontrol $*"'), ("prefill-probe", f"exit {status}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (script,) = blocks("bash")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (ran, ends), done.stderr


def test_the_same_configuration_is_checked_and_served() -> None:
    yaml = pytest.importorskip("yaml")
    pod, job, play = (yaml.safe_load(block) for block in blocks("yaml"))
    served = pod["spec"]["containers"][0]["command"]
    for check in (pod["spec"]["initContainers"][0], job["spec"]["template"]["spec"]["containers"][0]):
        assert check["command"][: check["command"].index("--") + 1] == ["prefill-probe", "check", "--json", "--"]
        assert check["command"][check["command"].index("--") + 1 :] == served
    assert play[0]["vars"]["serve"] == served
