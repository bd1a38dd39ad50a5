"""``prefill-probe show``, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from render.records import REFUSED, TIGHT, WHOLE

from prefill_probe import ProbeRecord
from prefill_probe.cli import main
from prefill_probe.record import default_report, write_record

pictures = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")


def show(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["show", *map(str, arguments)])


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write_record(WHOLE, tmp_path / "record.json")
    return tmp_path / "record.json"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    write_record(REFUSED, tmp_path / "other.json")
    return tmp_path / "other.json"


def refused(result: Result) -> str:
    """The one line that says what is wrong with the command line."""
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_without_a_file_it_is_the_last_record_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "there is no record at" in refused(show())
    write_record(TIGHT, default_report({"XDG_STATE_HOME": str(tmp_path)}))
    assert show().stdout.startswith("tight   a full prefill chunk fits this GPU")


def test_no_terminal_no_colours_and_no_torch(record: Path) -> None:
    code = "import sys; from prefill_probe.cli import main\n"
    code += f"try:\n    main(['show', {str(record)!r}])\nexcept SystemExit:\n"
    code += "    print({'torch', 'numpy', 'matplotlib', 'structlog'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


def test_json_is_the_record_alone_and_an_array_of_several(record: Path, other: Path) -> None:
    result = show("--json", record)
    assert result.stdout == record.read_text(encoding="utf-8")
    found = json.loads(show("--json", record, other).stdout)
    assert [each["verdict"] for each in found] == ["tight", "does-not-fit"]
    assert ProbeRecord.from_json(json.dumps(found[1])) == REFUSED


def test_several_records_are_compared(record: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    lines = show(record, other).stdout.splitlines()
    assert lines[0].split() == ["record", "GPU", "chunk", "need", "headroom", "verdict"]
    assert lines[2].endswith("8192  ~1696 MiB   512 MiB  does-not-fit")
    assert max(map(len, lines)) <= 70


@pictures
def test_all_files_that_are_asked_for_are_written_and_standard_output_stays_clean(record: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    plot, timeline, metrics = tmp_path / "a.png", tmp_path / "b.svg", tmp_path / "c.prom"
    result = show(record, "--plot", plot, "--timeline", timeline, "--metrics", metrics)
    assert (result.exit_code, result.stdout) == (0, "")
    assert len(result.stderr.splitlines()) == 3
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in timeline.read_text(encoding="utf-8")
    assert "prefill_probe_verdict{" in metrics.read_text(encoding="utf-8")
    with_json = show(record, "--json", "--plot", plot)
    assert with_json.stdout == record.read_text(encoding="utf-8")


@pictures
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "missing/a.png"], "there is no directory"),
        (["--plot", "a.jpeg"], "a picture is a .png or an .svg file"),
        (["--timeline", "a"], "a picture is a .png or an .svg file"),
        (["--metrics", "missing/a.prom"], "there is no directory"),
        (["--metrics", "."], "is a directory"),
        (["--plot", "a.png", "--metrics", "missing/a.prom"], "there is no directory"),
        (["--metrics", "a.prom", "--plot", "a.jpeg"], "a picture is a .png or an .svg file"),
    ],
)
def test_an_output_that_cannot_be_is_one_line_and_nothing_is_written(
    record: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(record.parent)
    assert said in refused(show(record, *arguments))
    assert list(record.parent.iterdir()) == [record]


@pictures
def test_a_timeline_that_an_old_record_does_not_have_is_one_line(other: Path) -> None:
    assert "this record has no timeline" in refused(show(other, "--timeline", other.parent / "a.png"))
    assert not (other.parent / "a.png").exists()


def test_a_picture_is_of_one_record(record: Path, other: Path, tmp_path: Path) -> None:
    assert "give one FILE" in refused(show(record, other, "--plot", tmp_path / "a.png"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("", "not a JSON document"),
        (TIGHT.to_json()[:900], "not a JSON document"),
        ('{"schema": 2}', "newer than this version reads"),
        ('{"schema": 1, "created": "x"}', "is missing"),
        ("[]", "no schema number"),
        (TIGHT.to_json().replace('"verdict": "tight"', '"verdict": "maybe"'), "is not one of"),
        ("\x00", "not a JSON document"),
    ],
)
def test_a_record_that_is_none_is_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    line = refused(show(path))
    assert said in line
    assert str(path) in line


@pytest.mark.parametrize(
    ("module", "option", "file"), [("matplotlib", "--plot", "a.png"), ("prometheus_client", "--metrics", "a.prom")]
)
def test_an_extra_that_is_not_installed_is_named(
    record: Path, module: str, option: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    line = refused(show(record, option, record.parent / file))
    assert f"need {module}: pip install 'prefill-probe[" in line
    assert list(record.parent.iterdir()) == [record]
