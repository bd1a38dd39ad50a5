"""Shared by all tests: no test writes into the state directory of whoever runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import pytest

from prefill_probe.settings import OPTIONS

sys.path.insert(0, str(Path(__file__).parent))

# A machine's speed is no property: no example fails for having taken long.
hypothesis.settings.register_profile("anywhere", deadline=None)
hypothesis.settings.load_profile("anywhere")


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


# Files that take longest, longest first: whoever runs several files at a time is not left with one of them at the end.
LONGEST = (
    "test_hook.py",
    "test_guard_serve.py",
    "test_estimate.py",
    "test_two_ranks.py",
    "test_no_trace.py",
    "test_check_layers.py",
    "test_start.py",
    "test_timeout.py",
    "test_check_cli.py",
    "test_engine.py",
    "test_estimate_reference.py",
    "test_ranks.py",
    "test_install.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    gpu = None
    for item in items:
        if item.get_closest_marker("gpu"):
            if gpu is None:
                gpu = _has_gpu()
            if not gpu:
                item.add_marker(pytest.mark.skip(reason="needs a machine with a CUDA GPU"))


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
