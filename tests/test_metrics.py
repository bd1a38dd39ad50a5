from __future__ import annotations

import dataclasses
import os
import re
import stat
import sys
from pathlib import Path

import pytest
from memory_engine import MIB, MemoryEngine

from prefill_probe import ProbeSettings, probe
from prefill_probe.metrics import MetricsError, write_metrics

parser = pytest.importorskip("prometheus_client.parser")

FITS = probe(MemoryEngine(4096 * MIB), ProbeSettings(margin_bytes=128 * MIB))
NONE_CAME_BACK = dataclasses.replace(probe(MemoryEngine(10 * MIB, floor=0.95), ProbeSettings()), need=None)


def parsed(path: Path) -> dict[str, list[tuple[dict[str, str], float]]]:
    """By metric name: labels and value of every sample, read by prometheus_client's own parser."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(path.read_text(encoding="utf-8")):
        assert family.type == "gauge"
        assert family.documentation
        assert re.fullmatch(r"prefill_probe(_[a-z]+)+", family.name)
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_file_holds_what_the_record_says_by_model(tmp_path: Path) -> None:
    path = tmp_path / "probe.prom"
    write_metrics(dataclasses.replace(FITS, created="2026-12-02T05:45:06+00:00"), path)
    found = parsed(path)
    ((labels, need),) = found["prefill_probe_need_bytes"]
    assert labels == {"model": "/models/example", "gpu": "Example GPU", "device": "cuda"}
    # 20 MiB and 0.2 MiB for each of 8192 tokens, as the engine takes them.
    assert need == 20 * MIB + 8192 * (MIB // 5)
    assert found["prefill_probe_headroom_bytes"][0][1] == 4096 * MIB
    assert found["prefill_probe_effective_chunk_tokens"][0][1] == 8192
    assert found["prefill_probe_timestamp_seconds"][0][1] == 1796190306
    assert len(found["prefill_probe_duration_seconds"]) == 1


def test_the_verdict_is_one_of_all_states(tmp_path: Path) -> None:
    path = tmp_path / "probe.prom"
    write_metrics(NONE_CAME_BACK, path)
    states = {labels["verdict"]: value for labels, value in parsed(path)["prefill_probe_verdict"]}
    assert states == {"fits": 0, "tight": 0, "does-not-fit": 1, "inconclusive": 0, "fault": 0}


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "probe.prom"
    write_metrics(NONE_CAME_BACK, path)
    assert "prefill_probe_need_bytes" not in parsed(path)


def test_records_of_two_models_stand_side_by_side(tmp_path: Path) -> None:
    other = dataclasses.replace(FITS, model={**FITS.model, "path": '/models/a "quoted"\\name'})
    write_metrics([FITS, other], tmp_path / "probe.prom")
    models = {labels["model"] for labels, _ in parsed(tmp_path / "probe.prom")["prefill_probe_need_bytes"]}
    assert models == {"/models/example", '/models/a "quoted"\\name'}


def test_node_exporter_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_metrics(FITS, tmp_path / "probe.prom")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "probe.prom").stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["probe.prom"]


def test_what_cannot_be_written_is_said_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(MetricsError, match="there is no directory"):
        write_metrics(FITS, tmp_path / "missing" / "probe.prom")
    with pytest.raises(MetricsError, match="is a directory"):
        write_metrics(FITS, tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MetricsError, match="No space left on device"):
        write_metrics(FITS, tmp_path / "probe.prom")
    assert list(tmp_path.iterdir()) == []


def test_without_prometheus_client_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MetricsError, match=r"pip install 'prefill-probe\[metrics\]'$"):
        write_metrics(FITS, tmp_path / "probe.prom")
    assert list(tmp_path.iterdir()) == []
