"""The evidence file: a case that is run again does not hide what it said before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))


def test_a_result_is_kept_when_its_case_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import machine

    monkeypatch.setattr(machine, "versions", lambda: {"gpu": "of another day"})
    for ok in (False, True):
        machine.Evidence("trial", {}, tmp_path).add("boots", {"ok": ok})
    document = json.loads((tmp_path / "trial.json").read_text(encoding="utf-8"))
    assert document["cases"]["boots"]["ok"]
    assert [(each["case"], each["ok"], "date" in each) for each in document["earlier"]] == [("boots", False, True)]


def test_a_start_that_failed_is_of_the_past_when_it_has_its_rows(tmp_path: Path) -> None:
    import machine

    evidence = machine.Evidence("trial", {}, tmp_path)
    evidence.add("start", {"ok": False})
    evidence.retire("start")
    evidence.retire("a start that never failed")
    evidence.write()
    document = json.loads((tmp_path / "trial.json").read_text(encoding="utf-8"))
    assert document["cases"] == {}
    assert [(each["case"], each["ok"]) for each in document["earlier"]] == [("start", False)]


def test_where_things_lie_is_not_in_it(tmp_path: Path) -> None:
    import machine

    places = (Path.home() / ".local/state/marker.json", Path(sys.prefix) / "lib", machine.REPOSITORY / "src")
    machine.Evidence("trial", {}, tmp_path).add("boots", {"error": " ".join(map(str, places))})
    text = (tmp_path / "trial.json").read_text(encoding="utf-8")
    assert "HOME/.local/state/marker.json ENVIRONMENT/lib REPOSITORY/src" in text
