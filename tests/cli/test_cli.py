from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from memory_engine import MIB, MemoryEngine

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
    status, output = invoke("check", "--", "ft", "serve", "--model", "x")
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


@pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")
def test_hook_status_names_the_version_and_the_mode() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from prefill_probe.cli import main; main(['hook', 'status'])"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "FreeToken" in done.stdout
    assert "PREFILL_PROBE=enforce" in done.stdout
