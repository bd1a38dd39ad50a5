"""The deadline and the marker, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from prefill_probe.watch import Marker, deadline, deadline_seconds, marker_of

TESTS = Path(__file__).parent


def run(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )


def test_a_block_that_ends_in_time_is_left_alone() -> None:
    with deadline(30, lambda: pytest.fail("reported")):
        pass
    time.sleep(0.05)


def test_no_thread_outlives_the_block() -> None:
    with deadline(30, lambda: pytest.fail("reported")):
        assert "prefill-probe-watch" in {thread.name for thread in threading.enumerate()}
    assert "prefill-probe-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_python_loop_is_ended_with_status_70_its_stacks_and_its_report() -> None:
    done = run(
        """
        from prefill_probe.watch import deadline
        def spin():
            while True:
                pass
        with deadline(0.3, lambda: print("reported", flush=True)):
            spin()
        """
    )
    assert done.returncode == 70
    assert "reported" in done.stdout
    assert "in spin" in done.stderr


def test_a_process_that_ignores_sigterm_and_sleeps_in_c_is_ended() -> None:
    done = run(
        """
        import signal, time
        from prefill_probe.watch import deadline
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with deadline(0.3, lambda: None):
            while True:
                time.sleep(60)
        """
    )
    assert done.returncode == 70


def test_a_block_that_ends_while_the_report_is_written_ends_the_process_all_the_same() -> None:
    """No engine goes on after a time-out."""
    done = run(
        """
        import threading, time
        from prefill_probe.watch import deadline
        late, reported = threading.Event(), threading.Event()
        def report():
            late.set()
            time.sleep(0.5)
            print("reported", flush=True)
        with deadline(0.3, report):
            late.wait()
        print("went on", flush=True)
        """
    )
    assert done.returncode == 70
    assert done.stdout == "reported\n"


def test_a_report_that_fails_does_not_keep_the_process_alive() -> None:
    done = run(
        """
        import time
        from prefill_probe.watch import deadline
        def report():
            raise OSError("disk full")
        with deadline(0.3, report):
            time.sleep(60)
        """
    )
    assert done.returncode == 70
    assert "disk full" in done.stderr


def test_a_main_thread_that_never_gives_up_the_interpreter_lock_is_ended_all_the_same() -> None:
    done = run(
        """
        import ctypes
        from prefill_probe import watch
        watch._LAST_RESORT_SECONDS = 0.5
        with watch.deadline(0.3, lambda: None):
            ctypes.PyDLL(None).sleep(60)   # PyDLL keeps the lock
        """,
        timeout=40,
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_a_hung_probe_writes_its_record_before_it_ends(tmp_path: Path) -> None:
    done = run(
        f"""
        import time
        from pathlib import Path
        from memory_engine import MIB, MemoryEngine
        from prefill_probe import ProbeSettings, _probe, probe
        from prefill_probe.record import write_record
        _probe.deadline_seconds = lambda timeout, tokens: timeout
        def hang(number, shape):
            if number == 2:
                time.sleep(60)
        probe(MemoryEngine(4096 * MIB, before_run=hang), ProbeSettings(timeout_seconds=0.5), print,
              lambda record: write_record(record, Path({str(tmp_path / "hung.json")!r})))
        """
    )
    assert done.returncode == 70
    record = json.loads((tmp_path / "hung.json").read_text())
    assert (record["verdict"], record["fault"]["kind"]) == ("fault", "time-out")
    assert [(run["run"], run["outcome"]) for run in record["shapes"]] == [("cold", "ok"), ("warm", "timeout")]
    assert "GPU utilisation 100 %" in done.stdout


def test_a_slow_card_is_given_the_time_it_needs() -> None:
    assert deadline_seconds(300, 8192) == 300
    assert deadline_seconds(300, 262_144) >= 262_144 / 1000


def test_a_clock_that_jumps_does_not_end_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    with deadline(30, lambda: pytest.fail("reported")):
        monkeypatch.setattr(time, "time", lambda: 4e9)
        time.sleep(0.1)


# The marker ----------------------------------------------------------------------------------------------------------

CONFIGURATION = {"model": "/models/example", "flags": {"--memory-ratio": 0.9}}


def killed_in_the_middle(directory: Path) -> int:
    code = f"""
import time
from pathlib import Path
from prefill_probe.watch import Marker
Marker(Path({str(directory)!r}), {CONFIGURATION!r}).set()
print("set", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "set\n"
    assert Marker(directory, CONFIGURATION).left_behind() is None  # it still runs
    process.send_signal(signal.SIGKILL)
    process.wait()
    return process.pid


def test_the_marker_of_a_killed_probe_is_found_by_the_next_boot_of_that_configuration_only(tmp_path: Path) -> None:
    pid = killed_in_the_middle(tmp_path)
    left = Marker(tmp_path, CONFIGURATION).left_behind()
    assert left is not None
    assert left == marker_of(tmp_path, pid)
    assert Marker(tmp_path, CONFIGURATION | {"model": "/models/other"}).left_behind() is None
    left.unlink()
    assert Marker(tmp_path, CONFIGURATION).left_behind() is None


def test_a_marker_is_gone_once_cleared(tmp_path: Path) -> None:
    marker = Marker(tmp_path / "new", CONFIGURATION)
    marker.set()
    assert marker.path.stat().st_mode & 0o777 == 0o600
    assert marker.left_behind() is None
    marker.clear()
    marker.clear()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_torn_marker_counts_as_left_behind(tmp_path: Path) -> None:
    marker = Marker(tmp_path, CONFIGURATION)
    torn = marker.path.with_name(marker.path.name.replace(str(os.getpid()), "99999999"))
    torn.write_text('{"pid": 99')
    assert marker.left_behind() == torn


def test_a_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    marker = Marker(tmp_path, CONFIGURATION)
    marker.set()
    content = json.loads(marker.path.read_text())
    other = marker.path.with_name(marker.path.name.replace(str(os.getpid()), "1"))
    other.write_text(json.dumps(content | {"started": "1"}))
    assert marker.left_behind() == other


def test_a_marker_of_the_same_number_from_an_earlier_life_is_left_behind(tmp_path: Path) -> None:
    """A container starts its processes under the same numbers every time."""
    marker = Marker(tmp_path, CONFIGURATION)
    marker.set()
    marker.path.write_text(json.dumps(json.loads(marker.path.read_text()) | {"started": "1"}))
    assert marker.left_behind() == marker.path
    assert marker_of(tmp_path, os.getpid()) is None  # and is not blamed on a child of this process


def test_a_directory_that_cannot_be_written_is_an_os_error_and_one_that_is_missing_holds_no_marker(
    tmp_path: Path,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="file"):
        Marker(blocked / "x", CONFIGURATION).set()
    assert Marker(tmp_path / "missing", CONFIGURATION).left_behind() is None
    assert marker_of(tmp_path / "missing", 1) is None


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("/site/engine/model.py", "no result within 2 s, in wait (model.py:2)"),
        (
            "/site/triton/compiler/compiler.py",
            "no result within 2 s, in wait (model.py:2); a kernel was being compiled: "
            "--prefill-probe-timeout SECONDS gives it longer",
        ),
    ],
)
def test_a_probe_that_is_late_says_where_it_was_and_whether_that_was_a_compilation(file: str, said: str) -> None:
    done = run(
        f"""
        import threading
        from memory_engine import MIB, MemoryEngine
        from prefill_probe import ProbeSettings, probe

        woven = {{}}
        exec(compile("def wait(event):\\n    event.wait()", {file!r}, "exec"), woven)

        class Slow(MemoryEngine):
            def place(self, frames):
                return super().place([frame for frame in frames if frame[2] == "wait" and "threading" not in frame[0]])

        def hang(number, shape):
            woven["wait"](threading.Event())

        engine = Slow(9000 * MIB, chunk=64, before_run=hang)
        probe(engine, ProbeSettings(timeout_seconds=2), keep=lambda record: print(record.fault.text, flush=True))
        """
    )
    assert (done.returncode, done.stdout.strip()) == (70, said), done.stderr
