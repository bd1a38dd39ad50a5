"""A record of runs on a virtual GPU."""

from __future__ import annotations

from dataclasses import replace

from prefill_probe.record import ProbeRecord
from prefill_probe.sizes import mib
from prefill_probe.virtual.device import Device


def as_virtual(record: ProbeRecord, device: Device) -> ProbeRecord:
    """``record``, marked as one of runs on ``device``, and what it takes for granted."""
    parts = ", ".join(f"{source} {mib(size)}" for source, size in device.outside.items())
    outside = f"outside of the allocator {mib(sum(device.outside.values()))} fitted to a start on an H200: {parts}"
    return replace(
        record,
        device="virtual",
        # Nothing was computed: neither seconds nor the routers' choice mean anything.
        shapes=[
            replace(run, run="virtual", seconds=0.0, tokens_per_second=None, routing=None) for run in record.shapes
        ],
        notes=[*record.notes, outside],
    )
