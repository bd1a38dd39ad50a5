from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from memory_engine import MIB, MemoryEngine

from engine_hooks.freetoken import switch
from prefill_probe import ProbeSettings, probe
from prefill_probe.cli import main
from prefill_probe.record import write_record


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def test_help_imports_no_torch_and_every_command_carries_an_example() -> None:
    code = "import sys; sys.argv = ['prefill-probe', '--help']; from prefill_probe.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules, 'structlog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
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


def hook_status(code: str = "", **environment: str) -> tuple[int, list[str]]:
    """The status in an interpreter of its own, after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nfrom prefill_probe.cli import main; main(['hook', 'status'])"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout.splitlines() or done.stderr.splitlines()


@needs_engine
def test_hook_status_says_in_three_lines_that_it_is_probed_by_what_and_which_engine() -> None:
    status, (probed, by, engine) = hook_status()
    assert (status, probed) == (0, "ft serve   probed at every start")
    assert "prefill-probe" in by
    assert "mode enforce" in by
    assert "FreeToken" in engine
    assert "internals as the hook knows them" in engine


@needs_engine
@pytest.mark.parametrize(
    ("code", "environment", "wrong"),
    [
        ("", {"PREFILL_PROBE": "off"}, "PREFILL_PROBE=off"),
        ("import freetoken.moe.offload_cache as m; del m.OffloadMoeCache.reset", {}, "it lacks freetoken.moe.offload"),
        ("from engine_hooks.freetoken import switch; switch.is_off = lambda: True", {}, "switched off"),
        ("import sys; sys.meta_path = [f for f in sys.meta_path if 'Wait' not in str(f)]", {}, "start-up file"),
    ],
)
def test_hook_status_says_what_is_wrong(code: str, environment: dict[str, str], wrong: str) -> None:
    status, lines = hook_status(code, **environment)
    assert status == 69
    assert lines[0].startswith(f"ft serve   not probed: {wrong}") or wrong in lines[0]
    assert len(lines) == 3


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
