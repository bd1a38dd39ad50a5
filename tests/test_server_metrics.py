"""The metrics file of a running server: counters arrive, seldom, and nothing that fails there reaches the server."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from memory_engine import MIB, MemoryEngine

from prefill_probe import ProbeSettings, metrics, probe
from prefill_probe.guard import Counters
from prefill_probe.metrics import ServerMetrics

parser = pytest.importorskip("prometheus_client.parser")

RECORD = probe(MemoryEngine(4096 * MIB), ProbeSettings(margin_bytes=128 * MIB))
LABELS = {"model": "/models/example", "gpu": "Example GPU", "device": "cuda", "server": "probe"}
GUARD = ("passes_shrunk", "tokens_delayed", "requests_refused", "misses")


def counted(path: Path) -> list[float]:
    """The guard's counters, read by prometheus_client's own parser; they are of this model and GPU."""
    families = {
        family.name: family for family in parser.text_string_to_metric_families(path.read_text(encoding="utf-8"))
    }
    values = []
    for name in GUARD:
        family = families[f"prefill_probe_guard_{name}"]
        assert family.type == "counter"
        assert family.documentation
        (sample,) = family.samples
        assert (sample.name, sample.labels) == (f"prefill_probe_guard_{name}_total", LABELS)
        values.append(sample.value)
    return values


def eventually(path: Path, values: list[float], seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and counted(path) == values:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When files were written."""
    times: list[float] = []
    genuine = metrics.replace_file

    def noted(*args: Any, **kwargs: Any) -> None:
        times.append(time.monotonic())
        genuine(*args, **kwargs)

    monkeypatch.setattr(metrics, "replace_file", noted)
    return times


def test_what_the_start_found_is_there_at_once_with_counters_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "probe.prom"
    ServerMetrics(path, pytest.fail).found(RECORD)
    assert counted(path) == [0, 0, 0, 0]
    gauges = {f.name: f.samples for f in parser.text_string_to_metric_families(path.read_text(encoding="utf-8"))}
    (need,) = gauges["prefill_probe_need_bytes"]
    assert (need.labels, need.value) == (LABELS, 20 * MIB + 8192 * (MIB // 5))


def test_replicas_of_one_model_on_like_gpus_stay_apart_and_apart_from_a_record_s_own_file(tmp_path: Path) -> None:
    """Node exporter takes no two samples of the same name and labels, from whatever files."""
    for name in ("replica-0.prom", "replica-1.prom"):
        ServerMetrics(tmp_path / name, pytest.fail).found(RECORD)
    metrics.write_metrics(RECORD, tmp_path / "record.prom")
    samples = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for path in tmp_path.iterdir()
        for family in parser.text_string_to_metric_families(path.read_text(encoding="utf-8"))
        for sample in family.samples
    ]
    assert len(samples) == len(set(samples)) > 30


def test_a_change_arrives_and_many_changes_are_one_write(
    tmp_path: Path, written: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "QUIET_SECONDS", 0.5)
    path, counters = tmp_path / "probe.prom", Counters()
    server = ServerMetrics(path, pytest.fail)
    server.found(RECORD)
    for _ in range(100):
        counters.passes_shrunk += 1
        counters.tokens_delayed += 64
        server.counted(counters)
    assert counted(path) == [0, 0, 0, 0]  # not before it is due
    assert eventually(path, [100, 6400, 0, 0])
    assert len(written) == 2
    assert written[1] - written[0] >= 0.5


def test_a_change_while_the_file_is_being_written_is_written_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "QUIET_SECONDS", 0.05)
    path, counters = tmp_path / "probe.prom", Counters()
    writing, go_on, genuine = threading.Event(), threading.Event(), metrics.replace_file

    def slow(*args: Any, **kwargs: Any) -> None:
        if counters.requests_refused:
            writing.set()
            assert go_on.wait(5)
        genuine(*args, **kwargs)

    monkeypatch.setattr(metrics, "replace_file", slow)
    server = ServerMetrics(path, pytest.fail)
    server.found(RECORD)
    counters.requests_refused = 1
    server.counted(counters)
    assert writing.wait(5)
    began = time.monotonic()
    counters.requests_refused = 2
    server.counted(counters)
    assert time.monotonic() - began < 1  # nobody waits for the disk
    go_on.set()
    assert eventually(path, [0, 0, 2, 0])


def test_nothing_new_is_not_written_again(
    tmp_path: Path, written: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "QUIET_SECONDS", 0.05)
    server, counters = ServerMetrics(tmp_path / "probe.prom", pytest.fail), Counters(misses=1)
    server.found(RECORD)
    server.counted(counters)
    assert eventually(tmp_path / "probe.prom", [0, 0, 0, 1])
    for _ in range(10):
        server.counted(counters)
    time.sleep(0.3)
    assert len(written) == 2


def test_a_directory_that_cannot_be_written_is_one_warning_and_is_used_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "QUIET_SECONDS", 0.0)
    said: list[str] = []
    path, counters = tmp_path / "missing" / "probe.prom", Counters()
    server = ServerMetrics(path, said.append)
    server.found(RECORD)
    for refused in (1, 2):
        counters.requests_refused = refused
        server.counted(counters)
        time.sleep(0.2)
    assert said == [f"metrics are not written: {path}: there is no directory {path.parent}"]
    path.parent.mkdir()
    counters.requests_refused = 3
    server.counted(counters)
    assert eventually(path, [0, 0, 3, 0])


def test_a_full_disk_is_one_warning_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    said: list[str] = []
    server = ServerMetrics(tmp_path / "probe.prom", said.append)
    server.found(RECORD)
    monkeypatch.setattr(os, "fsync", full)
    server.found(RECORD)
    server.found(RECORD)
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert counted(tmp_path / "probe.prom") == [0, 0, 0, 0]
    assert [each.name for each in tmp_path.iterdir()] == ["probe.prom"]


def test_without_prometheus_client_one_warning_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    said: list[str] = []
    server = ServerMetrics(tmp_path / "probe.prom", said.append)
    server.found(RECORD)
    server.found(RECORD)
    assert said == ["metrics are not written: metrics need prometheus_client: pip install 'prefill-probe[metrics]'"]
    assert list(tmp_path.iterdir()) == []


def test_no_thread_to_be_had_raises_nothing_and_the_next_change_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(metrics, "QUIET_SECONDS", 0.0)
    server, counters = ServerMetrics(tmp_path / "probe.prom", pytest.fail), Counters(misses=1)
    server.found(RECORD)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        server.counted(counters)
    counters.misses = 2
    server.counted(counters)
    assert eventually(tmp_path / "probe.prom", [0, 0, 0, 2])


def test_unless_it_is_asked_for_nothing_is_imported_or_written_and_a_check_writes_none(tmp_path: Path) -> None:
    code = """
    import os, sys
    from engine_hooks.freetoken import boot
    from prefill_probe import ProbeSettings, stages
    from prefill_probe.logs import get_logger
    print(boot._metrics(ProbeSettings.from_environ(os.environ), get_logger()), "prometheus_client" in sys.modules)
    os.environ["PREFILL_PROBE_METRICS"] = "probe.prom"
    asked = ProbeSettings.from_environ(os.environ)
    print(type(boot._metrics(asked, get_logger())).__name__)
    os.environ[stages.VARIABLE] = "stages"
    print(boot._metrics(asked, get_logger()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["None False", "ServerMetrics", "None"], done.stderr
    assert list(tmp_path.iterdir()) == []
