"""What is typed wrong is one line that names it, status 2, before anything is run, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from prefill_probe.cli import main

TRY = {"check": ["check"], "estimate": ["estimate", "--vram", "8GiB"]}


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines: list[str] = result.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "prefill-probe: No such command 'nope'."),
        (["--nope"], "prefill-probe: No such option"),
        (["hook", "nope"], "prefill-probe hook: No such command 'nope'."),
        (["systemd", "install", "--engine-unit", "../x"], "prefill-probe systemd install: Invalid value for '--engine"),
        (["show", "--nope"], "prefill-probe show: No such option"),
    ],
)
def test_a_word_that_is_not_known(arguments: list[str], says: str) -> None:
    assert refused(*arguments).startswith(says)


@pytest.mark.parametrize("command", TRY)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "vllm", "serve", "x"], "not vllm serve"),
        (["--margin", "128"], "write a number with a unit, such as 128MiB"),
        (["--timeout", "soon"], "'soon' is not a number of seconds"),
        (["--memory-ratio", "95"], "write a number above 0 and at most 1"),
        (["--layers", "0"], "'--layers'"),
        (["--unit", "none.service"], "none.service"),
        (["--", "ft", "serve", "--model", "/none"], "--model /none: no such directory"),
    ],
)
def test_a_value_that_is_not_accepted(command: str, arguments: list[str], says: str) -> None:
    line = refused(*TRY[command], *arguments)
    assert line.startswith(f"prefill-probe {command}: ")
    assert says in line


@pytest.mark.parametrize("command", TRY)
@pytest.mark.parametrize(
    ("option", "place", "says"),
    [
        ("--report", "folder", "--report folder: Is a directory"),
        ("--report", "file/r.json", "file: Not a directory"),
        ("--report", "file/new/r.json", "file: Not a directory"),
        ("--metrics", "none/m.prom", "--metrics none/m.prom: there is no directory none"),
        ("--metrics", "folder", "--metrics folder is a directory"),
    ],
)
def test_a_file_that_could_not_be_written_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str, place: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert says in refused(*TRY[command], option, place)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", TRY)
def test_a_unit_without_a_command(tmp_path: Path, command: str) -> None:
    (tmp_path / "no.service").write_text("[Service]\nType=simple\n")
    assert "no ExecStart=" in refused(*TRY[command], "--unit", str(tmp_path / "no.service"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"schema": 2}', "schema 2 is newer"),
        ('{"schema": 1, "verd', "not a JSON document"),
        ("{}", "no schema number"),
    ],
)
def test_a_record_that_cannot_be_read(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "r.json").write_text(content)
    assert says in refused("show", str(tmp_path / "r.json"))


def test_help_is_help_and_not_an_error() -> None:
    for arguments in ([], ["hook"], ["systemd"]):
        result = CliRunner().invoke(main, arguments)
        assert "Usage: " in result.output
        assert "Example:" in result.output
