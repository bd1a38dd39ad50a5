"""A record as metrics for Prometheus: a file that node exporter's textfile collector reads."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

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


_MISSING = "metrics need prometheus_client: pip install 'prefill-probe[metrics]'"


class MetricsError(ValueError):
    """Metrics that cannot be written; the text says why in one line."""


def write_metrics(records: ProbeRecord | Sequence[ProbeRecord], path: Path) -> None:
    """Write what ``records`` found to ``path``, whole or not at all, readable by all.

    Of two records of the same model and GPU the later one is written.

    Raises:
        MetricsError: prometheus_client is not installed, or the file cannot be written.
    """
    text = metrics_text([records] if isinstance(records, ProbeRecord) else records)
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


def metrics_text(records: Sequence[ProbeRecord]) -> str:
    """The metrics of ``records`` in Prometheus's text format.

    Raises:
        MetricsError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest
    except ImportError:
        raise MetricsError(_MISSING) from None
    registry = CollectorRegistry()
    gauges = {name: Gauge(name, text, _LABELS, registry=registry) for name, text in _GAUGES.items()}
    states = Gauge(
        "prefill_probe_verdict", "1 for the verdict, 0 for all others.", (*_LABELS, "verdict"), registry=registry
    )
    for record in records:
        labels = (str(record.model.get("path", "")), str(record.gpu.get("name", "")), record.device)
        for name, value in _values(record).items():
            if value is not None:
                gauges[name].labels(*labels).set(value)
        for verdict in VERDICTS:
            states.labels(*labels, verdict).set(verdict == record.verdict)
    return str(generate_latest(registry).decode("utf-8"))


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
