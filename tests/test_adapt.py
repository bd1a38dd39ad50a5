"""A start that goes on with what was run."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_engine import MIB, MemoryEngine

from prefill_probe import Mode, ProbeSettings
from prefill_probe.adapt import Adopted, Memory, adapted_probe, adapted_text, choose, permanent
from prefill_probe.record import Advice, ProbeRecord

ADAPT = ProbeSettings(mode=Mode.ADAPT, margin_bytes=128 * MIB)
ADAPT_KV = ProbeSettings(mode=Mode.ADAPT_KV, margin_bytes=128 * MIB)


def test_adapt_lowers_the_chunk_to_the_largest_that_was_run(tmp_path: Path) -> None:
    engine = MemoryEngine(600 * MIB)
    record = adapted_probe(engine, ADAPT, Memory(tmp_path / "adapted.json"))
    assert record.adapted is not None
    chunk = record.adapted["flags"]["--max-prefill-length"]
    assert engine.chunk == chunk
    assert record.adapted["was"] == {"--max-prefill-length": 8192}
    assert chunk in {run.new_tokens for run in record.shapes if run.outcome == "ok"}
    assert engine.headroom == 600 * MIB
    assert ProbeRecord.from_json(record.to_json()).adapted == record.adapted


def test_adapt_kv_keeps_the_chunk_and_leaves_the_pools_as_they_were_run(tmp_path: Path) -> None:
    engine = MemoryEngine(600 * MIB)
    record = adapted_probe(engine, ADAPT_KV, Memory(tmp_path / "adapted.json"))
    assert record.adapted is not None
    assert engine.chunk == 8192
    assert engine.resized[-1] == record.adapted["flags"] == {"--memory-ratio": 0.87}
    assert record.adapted["was"] == {"--memory-ratio": 0.95}


@pytest.mark.parametrize("settings", [ADAPT, ADAPT_KV])
def test_the_next_start_begins_there_and_confirms_it_in_one_run(settings: ProbeSettings, tmp_path: Path) -> None:
    memory = Memory(tmp_path / "adapted.json")
    first = adapted_probe(MemoryEngine(600 * MIB), settings, memory)
    engine = MemoryEngine(600 * MIB)
    second = adapted_probe(engine, settings, memory)
    assert len(engine.shapes) == 1
    assert second.verdict == "fits"
    assert first.adapted is not None
    assert second.adapted is not None
    assert second.adapted["flags"] == first.adapted["flags"]
    assert second.adapted["confirmed_from_an_earlier_start"]


def test_what_no_longer_leaves_the_margin_is_undone_and_found_anew(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "adapted.json")
    adapted_probe(MemoryEngine(600 * MIB), ADAPT, memory)
    engine = MemoryEngine(400 * MIB)
    record = adapted_probe(engine, ADAPT, memory)
    assert record.adapted is not None
    assert record.adapted["was"] == {"--max-prefill-length": 8192}
    assert engine.chunk == record.adapted["flags"]["--max-prefill-length"] < 2000
    assert not record.adapted["confirmed_from_an_earlier_start"]


def test_what_one_mode_adopted_is_not_the_other_s(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "adapted.json")
    adapted_probe(MemoryEngine(600 * MIB), ADAPT, memory)
    engine = MemoryEngine(600 * MIB)
    adapted_probe(engine, ADAPT_KV, memory)
    assert engine.chunk == 8192


def test_a_configuration_that_fits_is_not_adapted(tmp_path: Path) -> None:
    record = adapted_probe(MemoryEngine(4096 * MIB), ADAPT, Memory(tmp_path / "adapted.json"))
    assert (record.verdict, record.adapted) == ("fits", None)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_was_run_that_fits_nothing_is_adopted(tmp_path: Path) -> None:
    engine = MemoryEngine(600 * MIB, refuses_to_resize=True)
    record = adapted_probe(engine, ADAPT_KV, Memory(tmp_path / "adapted.json"))
    assert (record.verdict, record.adapted) == ("does-not-fit", None)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"flags": 1}', '{"flags": {"--x": "y"}, "word": "full"}', '{"flags": {}}']
)
def test_a_memory_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "adapted.json").write_text(text)
    assert Memory(tmp_path / "adapted.json").read() is None
    assert Memory(tmp_path / "missing.json").read() is None


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Memory(tmp_path / "file" / "adapted.json").write(Adopted({"--memory-ratio": 0.9}, "full"))


def test_only_what_was_run_is_chosen_and_a_pair_never() -> None:
    calculated = Advice({"--max-prefill-length": 4096}, False, 1, 1, "", "")
    pair = Advice({"--max-prefill-length": 4096, "--memory-ratio": 0.9}, True, 1, 1, "", "")
    chunk = Advice({"--max-prefill-length": 2048}, True, 1, 1, "", "")
    ratio = Advice({"--memory-ratio": 0.8}, True, 1, 1, "", "")
    assert choose([calculated, pair, chunk, ratio], Mode.ADAPT) == {"--max-prefill-length": 2048}
    assert choose([calculated, pair, chunk, ratio], Mode.ADAPT_KV) == {"--memory-ratio": 0.8}
    assert choose([calculated, pair], Mode.ADAPT) is None


def test_the_warning_names_both_values_and_the_command_line_that_makes_it_permanent(tmp_path: Path) -> None:
    record = adapted_probe(MemoryEngine(600 * MIB), ADAPT, Memory(tmp_path / "adapted.json"))
    argv = ["ft", "serve", "--model", "/models/a b", "--max-prefill-length=8192", "--port", "1"]
    assert adapted_text(record, argv) == (
        "adapted, because a full prefill chunk does not fit this GPU: --max-prefill-length 8192 -> 2240. "
        "To make it permanent: ft serve --model '/models/a b' --port 1 --max-prefill-length 2240"
    )
    assert permanent(["ft", "--memory-ratio", "0.95", "-x"], {"--memory-ratio": 0.87}) == [
        "ft",
        "-x",
        "--memory-ratio",
        "0.87",
    ]
