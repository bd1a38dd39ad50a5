from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm
from click.testing import CliRunner
from memory_engine import MIB, MemoryEngine

from engine_hooks.freetoken import switch
from prefill_probe import ProbeSettings, probe
from prefill_probe.cli import main
from prefill_probe.record import write_record


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def test_help_is_that_of_the_commands_and_imports_nothing() -> None:
    code = "import runpy, sys; sys.argv = ['prefill-probe', '--help']\n"
    code += "runpy.run_module('prefill_probe', run_name='__main__')\n"
    code += "print(sorted({'torch', 'structlog', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed, _, imported = done.stdout.rpartition("[")
    assert imported == "]\n"
    assert invoke("--help") == (0, printed)


def test_every_command_carries_an_example() -> None:
    for command in (["check"], ["show"], ["hook", "status"], ["systemd"]):
        status, output = invoke(*command, "--help")
        assert status == 0
        assert "Example:" in output


def test_check_says_what_it_needs_and_ends_with_69() -> None:
    status, output = invoke("check", "--", "ft", "serve", "--model", "on/hub")
    assert status == 69
    assert "CUDA GPU" in output


def test_show_prints_a_record_as_text_or_as_itself(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(probe(MemoryEngine(600 * MIB), ProbeSettings()), path)
    status, output = invoke("show", str(path))
    assert status == 0
    assert "PrefillOOMError: a full prefill chunk does not fit this GPU." in output
    status, output = invoke("show", "--json", str(path))
    assert json.loads(output)["verdict"] == "does-not-fit"


@pytest.mark.parametrize("content", [None, "", '{"schema": 9}'])
def test_what_cannot_be_shown_is_one_line_and_bad_usage(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    status, output = invoke("show", str(path))
    assert status == 2
    assert str(path) in output.splitlines()[-1]


needs_engine = pytest.mark.skipif(
    find_spec("freetoken") is None, reason="FreeToken is not installed in this environment"
)


@needs_engine
def test_hook_status_says_in_three_lines_that_it_is_probed_by_what_and_which_engine() -> None:
    code = "from prefill_probe.cli import main; main(['hook', 'status'])"
    done = warm.run(["-c", code])
    probed, by, engine = done.stdout.splitlines()
    assert (done.returncode, probed) == (0, "ft serve   probed at every start")
    assert "prefill-probe" in by
    assert "mode enforce" in by
    assert "FreeToken" in engine
    assert "internals as the hook knows them" in engine


@needs_engine
def test_hook_status_says_what_is_wrong() -> None:
    """One interpreter: importing the engine takes longer than all the rest."""
    code = """
import os, sys
sys.meta_path = [finder for finder in sys.meta_path if "Wait" not in str(finder)]
from click.testing import CliRunner
from engine_hooks.freetoken import attach, switch
from prefill_probe.cli import main

def say():
    result = CliRunner().invoke(main, ["hook", "status"])
    print(result.exit_code, len(result.output.splitlines()), result.output.splitlines()[0])

say()
attach._wrap_scheduler(sys.modules["freetoken.scheduler.scheduler"])
os.environ["PREFILL_PROBE"] = "off"
say()
del os.environ["PREFILL_PROBE"]
switch.is_off = lambda: True
say()
del sys.modules["freetoken.moe.offload_cache"].OffloadMoeCache.reset
say()
"""
    done = warm.run(["-c", code])
    wrong = ["the start-up file", "PREFILL_PROBE=off", "switched off", "it lacks freetoken.moe.offload_cache"]
    for line, why in zip(done.stdout.splitlines(), wrong, strict=True):
        assert line.startswith(f"69 3 ft serve   not probed: {why}")


def test_disable_and_enable_are_kept_until_the_other_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for command, off in (("disable", True), ("disable", True), ("enable", False), ("enable", False)):
        status, output = invoke("hook", command)
        assert status == 0
        assert switch.is_off() is off
        assert len(output.splitlines()) == 1
    (tmp_path / "share" / "prefill-probe").rmdir()
    (tmp_path / "share" / "prefill-probe").write_text("in the way")
    status, output = invoke("hook", "disable")
    assert status == 2
    assert "share/prefill-probe" in output.splitlines()[-1]
