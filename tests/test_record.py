from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_engine import MIB, MemoryEngine

from prefill_probe import ProbeRecord, ProbeSettings, RecordError, probe
from prefill_probe.engine import Routing
from prefill_probe.record import Timeline, default_report, read_record, state_directory, write_record


def record_of(headroom: int) -> ProbeRecord:
    return probe(MemoryEngine(headroom * MIB), ProbeSettings(margin_bytes=128 * MIB))


RECORDS = [record_of(headroom) for headroom in (4096, 1700, 600, 10)]
HELD = {"weights": 1, "expert_cache": 0, "kv_pool": 3, "state_pool": 0, "graphs": 5}
RECORDS.append(probe(MemoryEngine(4000 * MIB, held=HELD, routing=Routing(8, (8,), (9,))), ProbeSettings()))


@pytest.mark.parametrize("record", RECORDS)
def test_every_record_keeps_the_schema_that_ships_with_the_package(record: ProbeRecord) -> None:
    schema = json.loads(files("prefill_probe").joinpath("record.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(record.to_json()), schema)


def test_a_record_is_written_whole_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "last.json"
    write_record(RECORDS[0], path)
    assert read_record(path) == RECORDS[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_lists_of_numbers_take_one_line_each_and_texts_are_as_they_were() -> None:
    text = "a [\n  1,\n  2\n] in a note"
    shapes = [dataclasses.replace(RECORDS[-1].shapes[-1], timeline=Timeline([-1, 0], {"GDN": [1, 2]}))]
    record = dataclasses.replace(RECORDS[-1], shapes=shapes, notes=[text])
    lines = record.to_json().splitlines()
    assert [line.strip() for line in lines if 'GDN": [1' in line] == ['"GDN": [1, 2]']
    assert ProbeRecord.from_json(record.to_json()) == record


def test_records_of_before_these_fields_are_still_read() -> None:
    old = json.loads(RECORDS[-1].to_json())
    del old["memory"]["held"], old["miss"], old["reduced"], old["perturbed_routers"]
    for run in old["shapes"]:
        run.pop("timeline", None)
    record = ProbeRecord.from_json(json.dumps(old))
    assert record.memory.held is None
    assert all(run.timeline is None for run in record.shapes)


def test_records_in_the_evidence_are_still_read() -> None:
    evidence = Path(__file__).parents[1] / "docs" / "evidence"
    for name in ("incident.json", "incident-0.2.1.json"):
        for case in json.loads((evidence / name).read_text(encoding="utf-8"))["cases"].values():
            if case.get("record"):
                assert ProbeRecord.from_json(json.dumps(case["record"])).verdict == case["record"]["verdict"]


def test_a_full_disk_leaves_the_old_record_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.json"
    write_record(RECORDS[0], path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_record(RECORDS[2], path)
    assert read_record(path) == RECORDS[0]
    assert list(tmp_path.iterdir()) == [path]


def test_boots_that_share_a_state_directory_never_tear_a_record(tmp_path: Path) -> None:
    path = tmp_path / "last.json"
    write_record(RECORDS[0], path)
    done = threading.Event()

    def write(record: ProbeRecord) -> None:
        for _ in range(30):
            write_record(record, path)

    writers = [threading.Thread(target=write, args=(record,)) for record in RECORDS]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read_record(path) in RECORDS
    done.set()
    assert list(tmp_path.iterdir()) == [path]


def test_the_state_directory_is_the_unit_s_then_xdg_s_then_home_s() -> None:
    environ = {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "XDG_STATE_HOME": "/x", "HOME": "/home/user"}
    assert default_report(environ) == Path("/var/lib/a/last.json")
    del environ["STATE_DIRECTORY"]
    assert state_directory(environ) == Path("/x/prefill-probe")
    del environ["XDG_STATE_HOME"]
    assert state_directory(environ) == Path("/home/user/.local/state/prefill-probe")


def change(**values: Any) -> str:
    return json.dumps(json.loads(RECORDS[0].to_json()) | values)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a JSON document"),
        ('{"schema": 1, "crea', "not a JSON document"),
        ("[]", "no schema number"),
        ("{}", "no schema number"),
        (change(schema=2), "schema 2 is newer"),
        (change(verdict="perhaps"), "not one of fits"),
        (change(chunk=None), "record.chunk: expected an object"),
        (change(chunk={"requested": 1}), "effective is missing"),
        (change(shapes=[{"name": 3}]), r"record.shapes\[0\].name: expected str"),
        (change(memory=7), "record.memory"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(RecordError, match=says) as caught:
        ProbeRecord.from_json(text)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", binary, tmp_path):
        with pytest.raises(RecordError, match=str(path)):
            read_record(path)


def test_fields_of_a_newer_minor_version_are_left_alone() -> None:
    assert ProbeRecord.from_json(change(later={"a": 1})) == RECORDS[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.text())
def test_arbitrary_text_raises_nothing_but_a_record_error(text: str) -> None:
    with pytest.raises(RecordError):
        ProbeRecord.from_json(text)


@given(st.sampled_from(sorted(json.loads(RECORDS[2].to_json()))), json_values)
def test_an_arbitrary_field_raises_nothing_but_a_record_error(name: str, value: Any) -> None:
    try:
        ProbeRecord.from_json(json.dumps(json.loads(RECORDS[2].to_json()) | {name: value}))
    except RecordError:
        pass
