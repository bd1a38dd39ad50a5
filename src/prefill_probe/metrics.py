"""Metrics for Prometheus, in a file that node exporter's textfile collector reads: records, and a running server's."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefill_probe.guard import Counters
from prefill_probe.record import VERDICTS, ProbeRecord, replace_file

_LABELS = ("model", "gpu", "device")
_GAUGES = {
    "prefill_probe_need_bytes": "Memory that the worst prefill chunk needs over idle.",
    "prefill_probe_headroom_bytes": "Memory that the engine can still obtain when idle after graph capture.",
    "prefill_probe_margin_bytes": "Memory that must remain after the need.",
    "prefill_probe_requested_chunk_tokens": "The value of --max-prefill-length.",
    "prefill_probe_effective_chunk_tokens": "Tokens of the largest chunk that the scheduler will issue.",
    "prefill_probe_duration_seconds": "Time that the probe took.",
    "prefill_probe_timestamp_seconds": "When the record was made, in seconds since 1970.",
}

_COUNTERS = {
    "passes_shrunk": "Prefill passes that the guard made smaller, for lack of memory.",
    "tokens_delayed": "Tokens that such passes left to later ones.",
    "requests_refused": "Requests that ended because not even the smallest chunk fitted.",
    "misses": "Prefills that ran out of memory although the guard let them through.",
}

# Between two writes of a running server's counters.
QUIET_SECONDS = 5.0

_MISSING = "metrics need prometheus_client: pip install 'prefill-probe[metrics]'"


@dataclass(frozen=True)
class Server:
    """A running server, beside others of the same model on GPUs of the same name.

    Attributes:
        name: the value of its label ``server``.
        counters: of its guard.
    """

    name: str
    counters: Counters


class MetricsError(ValueError):
    """Metrics that cannot be written; the text says why in one line."""


def write_metrics(records: ProbeRecord | Sequence[ProbeRecord], path: Path, server: Server | None = None) -> None:
    """Write what ``records`` found to ``path``, whole or not at all, readable by all.

    Of two records of the same model and GPU the later one is written. ``server``: the one that the (only) record is of.

    Raises:
        MetricsError: prometheus_client is not installed, or the file cannot be written.
    """
    text = metrics_text([records] if isinstance(records, ProbeRecord) else records, server)
    check_path(path)
    try:
        replace_file(path, text, mode=0o644)
    except OSError as error:
        raise MetricsError(f"{path}: {error.strerror}") from None


def check_path(path: Path) -> None:
    """Raises ``MetricsError`` where ``path`` cannot be a file, or nothing is there to write it with."""
    if find_spec("prometheus_client") is None:
        raise MetricsError(_MISSING)
    if not path.parent.is_dir():
        raise MetricsError(f"{path}: there is no directory {path.parent}")
    if path.is_dir():
        raise MetricsError(f"{path} is a directory")


def metrics_text(records: Sequence[ProbeRecord], server: Server | None = None) -> str:
    """The metrics of ``records``, all of ``server`` where there is one, in Prometheus's text format.

    Raises:
        MetricsError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest
    except ImportError:
        raise MetricsError(_MISSING) from None
    registry = CollectorRegistry()
    names, own = (_LABELS, ()) if server is None else ((*_LABELS, "server"), (server.name,))
    gauges = {name: Gauge(name, text, names, registry=registry) for name, text in _GAUGES.items()}
    states = Gauge(
        "prefill_probe_verdict", "1 for the verdict, 0 for all others.", (*names, "verdict"), registry=registry
    )
    for record in records:
        labels = (str(record.model.get("path", "")), str(record.gpu.get("name", "")), record.device, *own)
        for name, value in _values(record).items():
            if value is not None:
                gauges[name].labels(*labels).set(value)
        for verdict in VERDICTS:
            states.labels(*labels, verdict).set(verdict == record.verdict)
        if server is not None:
            registry.register(_Counted(names, labels, server.counters))
    return str(generate_latest(registry).decode("utf-8"))


class _Counted:
    """Counters as prometheus_client collects them (its own hold when they were made as well)."""

    def __init__(self, names: Sequence[str], labels: Sequence[str], counters: Counters) -> None:
        self._names, self._labels, self._counters = names, labels, counters

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for name, text in _COUNTERS.items():
            family = CounterMetricFamily(f"prefill_probe_guard_{name}", text, labels=self._names)
            family.add_metric(self._labels, getattr(self._counters, name))
            yield family


class ServerMetrics:
    """The metrics file of one running server: what its start found, and what its guard did since.

    Nothing here raises, or keeps a prefill waiting: counters are written by a thread, ``QUIET_SECONDS`` after the last
    write at the earliest, and what cannot be written is one warning.

    Args:
        path: of the file; its name without the suffix is the label ``server`` of all metrics in it.
        warn: called with the warning.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, warn
        self._record: ProbeRecord | None = None
        self._counters = Counters()
        self._written = -QUIET_SECONDS
        self._waiting: threading.Timer | None = None
        self._lock = threading.Lock()

    def found(self, record: ProbeRecord) -> None:
        """Write ``record``, and the counters, now."""
        self._record = record
        self._write()

    def counted(self, counters: Counters) -> None:
        """Have ``counters`` written soon, if they have changed."""
        if counters == self._counters:
            return
        self._counters = replace(counters)
        if self._waiting is None:
            wait = max(0.0, self._written + QUIET_SECONDS - time.monotonic())
            self._waiting = threading.Timer(wait, self._write)
            self._waiting.daemon = True
            with contextlib.suppress(RuntimeError):  # no more threads: the next change tries again, or the next
                self._waiting.start()
                return
            self._waiting = None

    def _write(self) -> None:
        with self._lock:
            # From here on a change is written by another write.
            self._waiting, self._written = None, time.monotonic()
            if self._record is None:
                return
            try:
                write_metrics(self._record, self._path, Server(self._path.stem, self._counters))
            except Exception as error:
                self._warn(f"metrics are not written: {error}")
                self._warn = lambda text: None


def _values(record: ProbeRecord) -> dict[str, float | None]:
    """By metric; None where the record does not know, which is then left out."""
    return {
        "prefill_probe_need_bytes": record.need.device_bytes if record.need else None,
        "prefill_probe_headroom_bytes": record.memory.headroom_bytes,
        "prefill_probe_margin_bytes": record.memory.margin_bytes,
        "prefill_probe_requested_chunk_tokens": record.chunk.requested,
        "prefill_probe_effective_chunk_tokens": record.chunk.effective,
        "prefill_probe_duration_seconds": record.timings.get("probe_seconds"),
        "prefill_probe_timestamp_seconds": _seconds(record.created),
    }


def _seconds(created: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
