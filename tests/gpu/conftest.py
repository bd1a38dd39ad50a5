"""What tests on a machine with a CUDA GPU share."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """FreeToken boots only where CUDA is not initialised yet, and one process runs all: what boots it comes first."""
    items.sort(key=lambda item: item.path.name != "test_no_trace_gpu.py")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is told at once: who runs this on a borrowed machine may not see the summary."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", flush=True)
