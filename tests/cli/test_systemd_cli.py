from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefill_probe.cli import main
from prefill_probe.cli.engine_command import enter_unit
from prefill_probe.systemd.unit_file import read_unit


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["systemd", *arguments])
    return result.exit_code, result.output


def refused(*arguments: str) -> str:
    status, output = invoke(*arguments)
    assert status == 2, output
    return output.splitlines()[-1]


@pytest.fixture
def ft(tmp_path: Path) -> str:
    program = tmp_path / "bin" / "ft"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("command", ["print", "install"])
def test_help_carries_an_example(command: str) -> None:
    status, output = invoke(command, "--help")
    assert status == 0
    assert "Example:" in output


def test_print_shows_both_files_under_their_paths(ft: str) -> None:
    status, output = invoke("print", "--engine-unit", "freetoken", "--", ft, "serve", "--model", "/a b")
    assert status == 0
    assert "# /etc/systemd/system/prefill-probe@.service\n" in output
    assert "# /etc/systemd/system/freetoken.service.d/50-prefill-probe.conf\n" in output
    assert f'\nExecStart={ft} serve --model "/a b"\n' in output


def test_user_units_have_their_place_and_ask_for_no_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/somewhere")
    status, output = invoke("print", "--user", "--engine-unit", "freetoken")
    assert status == 0
    assert "# /somewhere/systemd/user/prefill-probe@.service\n" in output
    assert "Protect" not in output.replace("ProtectClock=, ProtectHome=", "")


def test_install_writes_says_what_is_next_and_keeps_what_differs(tmp_path: Path, ft: str) -> None:
    given = ["--directory", str(tmp_path / "units"), "--engine-unit", "freetoken", "--user"]
    status, output = invoke("install", *given, "--", ft, "serve", "--model", "a")
    assert status == 0
    assert "systemctl --user daemon-reload" in output
    drop_in = tmp_path / "units/freetoken.service.d/50-prefill-probe.conf"
    assert drop_in.stat().st_mode & 0o777 == 0o644
    assert "unchanged" in invoke("install", *given, "--", ft, "serve", "--model", "a")[1]

    before = {path: path.read_bytes() for path in (tmp_path / "units").rglob("*") if path.is_file()}
    said = refused("install", *given, "--start-timeout", "5", "--", ft, "serve", "--model", "b")
    assert "--force" in said
    assert {path: path.read_bytes() for path in (tmp_path / "units").rglob("*") if path.is_file()} == before
    assert invoke("install", *given, "--force", "--", ft, "serve", "--model", "b")[0] == 0
    (tmp_path / "units/freetoken.service").write_text("[Service]\nExecStart=/bin/false\n")
    assert read_unit(tmp_path / "units/freetoken.service", {}).arguments == [ft, "serve", "--model", "b"]


def test_nothing_is_half_written(tmp_path: Path) -> None:
    (tmp_path / "freetoken.service.d").write_text("in the way of a directory")
    said = refused("install", "--directory", str(tmp_path), "--engine-unit", "freetoken")
    assert "freetoken.service.d" in said
    assert [path.name for path in tmp_path.iterdir()] == ["freetoken.service.d"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--engine-unit"),
        (("--engine-unit", "a b"), "'a b' is not the name of a service"),
        (("--engine-unit", "a", "--", "vllm", "serve"), "ft serve --model DIR"),
        (("--engine-unit", "a", "--", "/nowhere/ft", "serve"), "/nowhere/ft: no such program"),
        (("--engine-unit", "a", "--user", "--run-as", "b"), "--run-as"),
        (("--engine-unit", "a", "--run-as", "b c\nd"), "--run-as"),
        (("--engine-unit", "a", "--start-timeout", "0"), "--start-timeout"),
    ],
)
def test_bad_usage_is_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in refused("install", "--directory", str(tmp_path), *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ("[Unit]\n", "it has no [Service] section"),
        ("[Service]\n", "it has no ExecStart="),
        ("[Service]\nExecStart=/bin/true\n", "its command is to be the engine's, ft serve --model DIR"),
        ("[Service]\nExecStart=/ft serve --model m\nWorkingDirectory=/nowhere\n", "WorkingDirectory=/nowhere: No such"),
        ("[Service]\nExecStart=/ft serve\n", "names no model"),
    ],
)
def test_estimate_refuses_a_unit_by_name(tmp_path: Path, unit: str, said: str) -> None:
    file = tmp_path / "engine.service"
    file.write_text(unit)
    result = CliRunner().invoke(main, ["estimate", "--vram", "16GiB", "--unit", str(file)])
    assert result.exit_code == 2, result.output
    assert said in result.output.splitlines()[-1]


def test_estimate_takes_a_unit_or_a_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["estimate", "--unit", "x", "--vram", "16GiB", "--", "ft", "serve"])
    assert result.exit_code == 2
    assert "leave out what follows --" in result.output.splitlines()[-1]


def test_a_unit_gives_command_environment_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFILL_PROBE_MARGIN", "1GiB")
    monkeypatch.setenv("M", "before")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    file = tmp_path / "engine.service"
    file.write_text(
        f"[Service]\nExecStart=/ft serve --model $M\nEnvironment=M=m PREFILL_PROBE_MARGIN=2GiB\n"
        f"WorkingDirectory={tmp_path}/models\n"
    )
    assert enter_unit(file, ()) == ("/ft", "serve", "--model", "m")
    assert os.environ["PREFILL_PROBE_MARGIN"] == "2GiB"
    assert Path.cwd() == tmp_path / "models"
