"""What a boot does around the probe: record, marker, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from memory_engine import MIB, MemoryEngine

from engine_hooks.freetoken import boot
from prefill_probe import Mode, PrefillFaultError, ProbeSettings, probe
from prefill_probe.record import state_directory
from prefill_probe.watch import Marker


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda text: self.lines.append((level, text))


def markers() -> list[Path]:
    return sorted(state_directory(os.environ).glob("unfinished-*"))


def leave_a_marker_behind(engine: MemoryEngine) -> Path:
    identity = engine.identity()
    marker = Marker(
        state_directory(os.environ),
        {"model": identity.model, "flags": identity.flags, "gpu": identity.gpu["name"], "engine": identity.engine},
    )
    marker.set()
    left = marker.path.with_name(marker.path.name.replace(f"-{os.getpid()}.", "-99999999."))
    marker.path.rename(left)
    content = left.read_text().replace(f'"pid": {os.getpid()}', '"pid": 99999999')
    left.write_text(content)
    return left


def test_an_unwritable_report_is_a_warning_and_the_verdict_stands(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    log = Log()
    boot._keep(probe(MemoryEngine(4096 * MIB), ProbeSettings()), blocked / "record.json", log)
    assert [level for level, _ in log.lines] == ["warning"]


def test_the_marker_stands_while_the_probe_runs_and_not_after() -> None:
    with boot._marked(MemoryEngine(MIB), Mode.ENFORCE, True, Log()) as wanted:  # type: ignore[arg-type]
        assert wanted
        assert len(markers()) == 1
    assert markers() == []


def test_the_marker_is_gone_after_an_interrupt() -> None:
    def stopped() -> None:
        with boot._marked(MemoryEngine(MIB), Mode.ENFORCE, True, Log()):  # type: ignore[arg-type]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert markers() == []


def test_a_probe_that_never_came_back_is_not_repeated_under_enforce_and_the_error_names_the_file() -> None:
    engine = MemoryEngine(MIB)
    left = leave_a_marker_behind(engine)

    def start() -> None:
        with boot._marked(engine, Mode.ENFORCE, True, Log()):  # type: ignore[arg-type]
            pytest.fail("probed again")

    with pytest.raises(PrefillFaultError, match=str(left)) as caught:
        start()
    assert caught.value.exit_status == 70
    left.unlink()
    with boot._marked(engine, Mode.ENFORCE, True, Log()) as wanted:  # type: ignore[arg-type]
        assert wanted


def test_a_probe_that_never_came_back_is_skipped_with_a_warning_under_warn() -> None:
    engine, log = MemoryEngine(MIB), Log()
    left = leave_a_marker_behind(engine)
    with boot._marked(engine, Mode.WARN, True, log) as wanted:  # type: ignore[arg-type]
        assert wanted is None
    assert [level for level, _ in log.lines] == ["warning"]
    assert str(left) in log.lines[0][1]


def test_a_boot_that_is_stopped_by_sigterm_during_the_probe_leaves_no_marker(tmp_path: Path) -> None:
    code = f"""
    import os, time
    from memory_engine import MIB, MemoryEngine
    from engine_hooks.freetoken import boot
    from prefill_probe import Mode
    from prefill_probe.logs import get_logger
    with boot._marked(MemoryEngine(MIB), Mode.ENFORCE, True, get_logger()):
        assert len(os.listdir({str(tmp_path / "s" / "prefill-probe")!r})) == 1
        print("running", flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "s"), "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM
    assert list((tmp_path / "s" / "prefill-probe").iterdir()) == []


def test_two_boots_of_one_configuration_at_once_do_not_take_each_other_for_dead(tmp_path: Path) -> None:
    engine = MemoryEngine(MIB)
    with boot._marked(engine, Mode.ENFORCE, True, Log()):  # type: ignore[arg-type]
        code = """
        from memory_engine import MIB, MemoryEngine
        from engine_hooks.freetoken import boot
        from prefill_probe import Mode
        from prefill_probe.logs import get_logger
        with boot._marked(MemoryEngine(MIB), Mode.ENFORCE, True, get_logger()) as wanted:
            print(wanted is not None)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        assert done.stdout == "True\n", done.stderr
        assert len(markers()) == 1


def test_a_read_only_state_directory_is_a_warning_and_the_probe_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("STATE_DIRECTORY", str(blocked / "below"))
    log = Log()
    with boot._marked(MemoryEngine(MIB), Mode.ENFORCE, True, log) as wanted:  # type: ignore[arg-type]
        assert wanted
    assert [level for level, _ in log.lines] == ["warning"]


def test_a_hook_that_is_switched_off_starts_the_engine_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(boot.switch, "is_off", lambda: True)
    boot.probed_init(lambda *given: started.append(given), "scheduler", "config")
    assert started == [("scheduler", "config")]
    assert "switched off in this environment" in capsys.readouterr().err
