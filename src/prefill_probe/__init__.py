"""prefill-probe: run one full prefill chunk before an LLM engine serves.

The public names are imported when first used, so that ``import prefill_probe`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefill_probe._probe import probe
    from prefill_probe.advice import Candidate, Point, recommend
    from prefill_probe.engine import Budget, Engine, Geometry, Identity, PlanRefused, Pool
    from prefill_probe.faults import (
        Fault,
        PrefillFaultError,
        PrefillInconclusiveError,
        PrefillOOMError,
        PrefillProbeError,
        PrefillTimeoutError,
        classify,
    )
    from prefill_probe.meter import CudaMeter, Meter
    from prefill_probe.record import ProbeRecord, RecordError
    from prefill_probe.settings import Mode, ProbeSettings
    from prefill_probe.shape import Limits, Sequence, Shape

__version__ = "0.1.0"

_HOME = {
    "advice": ("Candidate", "Point", "recommend"),
    "engine": ("Budget", "Engine", "Geometry", "Identity", "PlanRefused", "Pool"),
    "faults": (
        "Fault",
        "PrefillFaultError",
        "PrefillInconclusiveError",
        "PrefillOOMError",
        "PrefillProbeError",
        "PrefillTimeoutError",
        "classify",
    ),
    "meter": ("CudaMeter", "Meter"),
    "_probe": ("probe",),
    "record": ("ProbeRecord", "RecordError"),
    "settings": ("Mode", "ProbeSettings"),
    "shape": ("Limits", "Sequence", "Shape"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(f"{__name__}.{module}"), name)
