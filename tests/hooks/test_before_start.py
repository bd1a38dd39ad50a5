"""The estimate before an ``ft serve``: what starts one, what becomes of it, and that no failure of it ends a start."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preflight_program import FOUND

from engine_hooks.freetoken import preflight
from prefill_probe import preflight as core
from prefill_probe.geometry import make_model
from prefill_probe.preflight import Child, Prediction, Unpredicted

needs_engine = pytest.mark.skipif(
    find_spec("freetoken") is None, reason="FreeToken is not installed in this environment"
)
SITE = str(Path(__file__).parents[1] / "virtual_site")
# The published incident.
INCIDENT = [
    "--max-running-requests", "1", "--cuda-graph-max-bs", "1", "--moe-cache-size", "512", "--memory-ratio", "0.95",
    "--disable-moe-prefill-overlap", "--dummy-weight", "--text-model-only", "--port", "18933",
]  # fmt: skip
CONFIG = SimpleNamespace(tp_info=SimpleNamespace(size=1))
REFUSE = {"PREFILL_PROBE_PREFLIGHT": "refuse"}


@needs_engine
def test_refuse_ends_a_start_that_is_clearly_short_with_78_before_any_rank(tmp_path: Path) -> None:
    """A whole ``ft serve``; what it does in mode warn is in ``tests/virtual/test_start.py``."""
    model = make_model(tmp_path, "flash-next-nvfp4", layers=4)
    arguments = ["serve", "--model", str(model), *INCIDENT, "--prefill-probe-preflight", "refuse"]
    done = subprocess.run(
        [sys.executable, "-m", "freetoken.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SITE, *filter(None, sys.path)]), "HF_HUB_OFFLINE": "1"}
        | {"VIRTUAL_CARD": "15.5GiB", "VIRTUAL_VRAM": "15.5GiB"},
    )
    log = done.stdout + done.stderr
    assert done.returncode == 78, log
    assert "PrefillOOMError: a full prefill chunk will not fit this GPU, by an estimate" in log
    # What this chunk takes of an H200: 1635.5 MiB.
    assert "  needs        about 1.60 GiB   headroom" in log
    assert "core|rank" not in log


class Started(list[bool]):
    """In place of ``Child``: whether each that was started is beside the load; its prediction is that of a shortage."""

    def __call__(self, program: str, request: object, *, beside: bool) -> Started:
        self.append(beside)
        return self

    def prediction(self) -> Prediction:
        return FOUND


def before_start(config: Any = CONFIG, *, over: bool = False) -> None:
    """``preflight.before_start``; what it says beside a load has been said when this returns."""
    preflight.before_start(config, over=lambda: over)
    for thread in threading.enumerate():
        if thread.name == "prefill-probe preflight":
            thread.join()


def environ(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("size", "environment", "started", "refused"),
    [
        (1, {}, [True], False),
        (1, REFUSE, [False], True),
        (1, {**REFUSE, "PREFILL_PROBE": "warn"}, [False], True),
        # A smaller chunk or smaller caches, once loaded, are what was asked for.
        (1, {**REFUSE, "PREFILL_PROBE": "adapt"}, [True], False),
        (1, {**REFUSE, "PREFILL_PROBE": "adapt-kv"}, [True], False),
        (1, {**REFUSE, "PREFILL_PROBE": "off"}, [], False),
        (1, {"PREFILL_PROBE_PREFLIGHT": "off"}, [], False),
        (2, REFUSE, [], False),
    ],
)
def test_which_starts_are_estimated_and_which_are_refused(
    size: int, environment: dict[str, str], started: list[bool], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Started()
    monkeypatch.setattr(preflight, "Child", found)
    environ(monkeypatch, environment)
    with pytest.raises(SystemExit, match="78") if refused else contextlib.nullcontext():
        before_start(SimpleNamespace(tp_info=SimpleNamespace(size=size)))
    assert found == started


def test_an_estimate_that_comes_after_the_load_is_not_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "Child", Started())
    before_start(over=True)
    assert capsys.readouterr().err == ""
    before_start()
    assert capsys.readouterr().err.count(FOUND.line()) == 1


def instead(request: str) -> Callable[..., Child]:
    """In place of ``Child``: one whose process does what ``request`` says (``tests/preflight_program.py``)."""
    return lambda program, _, *, beside: Child("preflight_program", request, beside=beside)


@pytest.mark.parametrize("environment", [{}, REFUSE], ids=["warn", "refuse"])
@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ("hangs", "no preflight: it took longer than 1 s"),
        ("dies", "no preflight: it ended without a word (status -9)"),
        ("babbles", "no preflight: it ended in the middle of a word"),
        ("fails", "no preflight: RuntimeError: an engine that fails"),
        ("no gpu", ""),
    ],
)
def test_a_start_goes_on_when_its_estimate_comes_to_nothing(
    request_: str,
    says: str,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And says why in one line; where there is no GPU it is the engine that has something to say."""
    monkeypatch.setattr(preflight, "Child", instead(request_))
    monkeypatch.setattr(core, "WAITED_SECONDS", 1.0)
    monkeypatch.setattr(core, "BESIDE_SECONDS", 1.0)
    environ(monkeypatch, environment)
    before_start()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == bool(says)
    assert says in "".join(said)


def test_a_process_that_cannot_be_started_is_a_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object, **more: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(preflight, "Child", fails)
    before_start()
    assert "no preflight: OSError: no more processes" in capsys.readouterr().err


def test_without_that_gpu_its_process_has_nothing_to_say() -> None:
    """The real one; it imports no engine for this."""
    with pytest.raises(Unpredicted, match="no CUDA GPU answers") as caught:
        Child("engine_hooks.freetoken.predict", (b"", "99", {}), beside=False).prediction()
    assert caught.value.quiet


@dataclass(frozen=True)
class Arguments:
    """Of ``ServerArgs`` what the process looks at."""

    gpu: tuple[str, ...] = ("3",)
    gpu_assigned: tuple[str, ...] | None = ("3",)


def boots(monkeypatch: pytest.MonkeyPatch, boot: Callable[[Arguments], None]) -> None:
    from engine_hooks.freetoken import virtual

    @contextlib.contextmanager
    def booted(config: Arguments) -> Iterator[None]:
        boot(config)
        yield

    monkeypatch.setattr(virtual, "booted", booted)


def unpredicted(monkeypatch: pytest.MonkeyPatch, boot: Callable[[Arguments], None]) -> str:
    """Why nothing is predicted of an engine that starts as ``boot`` does."""
    import logging

    from engine_hooks.freetoken import predict
    from prefill_probe.virtual.cards import card_of

    boots(monkeypatch, boot)
    try:
        with pytest.raises(Unpredicted) as caught:
            predict.predicted(pickle.dumps(Arguments()), card_of(16 << 30, (12, 0)))
    finally:
        logging.disable(logging.NOTSET)
    assert not caught.value.quiet
    return str(caught.value)


def test_a_model_that_cannot_be_traced_is_told_by_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def boot(config: Arguments) -> None:
        import torch

        torch.randn(1 << 20, device="cuda").nonzero()

    why = unpredicted(monkeypatch, boot)
    assert "aten::nonzero" in why
    assert "\n" not in why


def test_a_start_that_has_no_room_or_is_refused_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's only GPU is the virtual one, whatever the real one was chosen by."""
    from prefill_probe.virtual.errors import StartError

    def boot(config: Arguments) -> None:
        assert (config.gpu, config.gpu_assigned) == ((), None)
        raise StartError("does not fit: the engine does not start: CUDA out of memory")

    assert unpredicted(monkeypatch, boot) == "does not fit: the engine does not start: CUDA out of memory"
