"""What tests on a machine with a CUDA GPU share."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """FreeToken boots only where CUDA is not initialised yet, and one process runs all: what boots it comes first."""
    items.sort(key=lambda item: item.path.name != "test_no_trace_gpu.py")
