"""What an engine runs on, as a record names it."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any


def version_of(distribution: str) -> str:
    """The installed version of a distribution; "unknown" if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def versions_of(*distributions: str) -> dict[str, str]:
    """The versions of distributions, and of Python."""
    return {name: version_of(name) for name in distributions} | {"python": platform.python_version()}


def gpu_of(device: Any) -> dict[str, Any]:
    """name, capability, total_bytes, driver, wsl, unified of a CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": properties.total_memory,
        "driver": _driver(),
        "wsl": "microsoft" in platform.release().lower(),
        "unified": bool(getattr(properties, "is_integrated", False)),
    }


def _driver() -> str:
    """The driver's version, from the kernel module's own file."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "unknown")
