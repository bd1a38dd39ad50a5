"""The probe's flags by the parser alone: what is wrong ends it before anything is loaded."""

from __future__ import annotations

import os

import pytest

from engine_hooks.freetoken import flags
from prefill_probe.settings import OPTIONS, Option, ProbeSettings

BAD = {
    "--prefill-probe": "adjust",
    "--prefill-probe-margin": "128",
    "--prefill-probe-timeout": "-1",
    "--prefill-probe-shapes": "round",
    "--prefill-probe-report": "",
    "--prefill-probe-preflight": "enforce",
    "--prefill-probe-metrics": "",
    "--prefill-guard": "maybe",
}
GOOD = {
    "--prefill-probe": "warn",
    "--prefill-probe-margin": "1GiB",
    "--prefill-probe-timeout": "12.5",
    "--prefill-probe-shapes": "deep",
    "--prefill-probe-report": "r.json",
    "--prefill-probe-preflight": "refuse",
    "--prefill-probe-metrics": "probe.prom",
    "--prefill-guard": "off",
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set first, so that what a flag exports is gone with the test."""
    for option in OPTIONS:
        monkeypatch.setenv(option.variable, "")


def parse(*arguments: str) -> None:
    flags._Parser(prog="ft serve").parse_args(list(arguments))


def test_every_flag_is_tried_here() -> None:
    assert set(BAD) == set(GOOD) == {option.flag for option in OPTIONS}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_a_bad_value_names_its_flag_or_variable_in_the_last_line(
    option: Option, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, variable = option.flag, option.variable
    with pytest.raises(SystemExit, match="2"):
        parse(flag, BAD[flag])
    assert flag in capsys.readouterr().err.splitlines()[-1]
    if not BAD[flag]:
        return  # an empty variable is none
    monkeypatch.setenv(variable, BAD[flag])
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert f"environment variable {variable}: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_a_flag_is_exported_and_wins_over_its_variable(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, variable, field = option.flag, option.variable, option.field
    if BAD[flag]:
        monkeypatch.setenv(variable, BAD[flag])
    parse(flag, GOOD[flag])
    assert os.environ[variable] == GOOD[flag]
    assert getattr(ProbeSettings.from_environ(os.environ), field) == option.parse(GOOD[flag])
