"""The hook against the real FreeToken package, on whatever torch is here; nothing of the engine is replaced."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PREFILL_")}


def python(code: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.run(["-c", textwrap.dedent(code)], ENVIRONMENT | environment, timeout)


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "freetoken.cli", "serve", *arguments], ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | environment)


def test_installing_the_package_is_all_that_is_needed() -> None:
    code = """
import freetoken.server.args, freetoken.scheduler.scheduler as s, freetoken.server.api_server as a
for wrapped in (s.Scheduler.__init__, a.run_api_server, freetoken.server.args.parse_args):
    print(wrapped.__wrapped__)
from freetoken.llm import LLM
print(LLM.__mro__[1] is s.Scheduler)
"""
    done = warm.cold(["-c", code], ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<function") == 3
    assert done.stdout.strip().endswith("True")


def test_an_interpreter_that_is_not_freetoken_s_is_left_alone() -> None:
    code = """
import sys
print(sorted(m for m in sys.modules if m.split('.')[0] in
      ('torch', 'structlog', 'click', 'prefill_probe', 'engine_hooks', 'freetoken')))
"""
    done = warm.cold(["-c", code], ENVIRONMENT)
    assert done.stdout.strip() == str(["engine_hooks"])


def test_the_start_up_file_costs_less_than_reading_site_itself() -> None:
    """By the interpreter's own import times, side by side in each run (``scripts/bench startup`` prints them)."""
    ratios = []
    for _ in range(9):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "pass"],
            capture_output=True,
            text=True,
            check=True,
            env={name: value for name, value in ENVIRONMENT.items() if name != "PYTHONDONTWRITEBYTECODE"},
        )
        found = re.findall(r"import time:\s+(\d+) \|\s+\d+ \| +(\S+)", done.stderr)
        own = {name: int(microseconds) for microseconds, name in found}
        assert [name for name in own if name.startswith("engine_hooks")] == ["engine_hooks"]
        ratios.append(own["engine_hooks"] / own["site"])
    assert min(ratios) < 1, ratios


def test_the_help_shows_every_flag_with_its_environment_twin() -> None:
    done = serve("--help")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    from prefill_probe.settings import OPTIONS

    for option in OPTIONS:
        assert option.flag in text
        assert option.variable in text
    assert "--max-prefill-length" in text


def test_a_bad_value_is_a_usage_error_before_anything_is_loaded() -> None:
    """Every flag's bad values: test_flags.py."""
    done = serve("--model", "/nowhere/model", "--prefill-probe-margin", "128")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "--prefill-probe-margin" in last
    assert "a number with a unit" in last


def test_a_bad_variable_is_a_usage_error_too() -> None:
    done = serve("--model", "/nowhere/model", PREFILL_PROBE="maybe")
    assert done.returncode == 2
    assert "environment variable PREFILL_PROBE" in done.stderr


def test_a_model_directory_that_is_missing_is_the_engine_s_own_error() -> None:
    with_probe = serve("--model", "/nowhere/model")
    # The flag is given: what the variable says does not matter.
    without = serve("--model", "/nowhere/model", "--prefill-probe", "off", PREFILL_PROBE="maybe")
    assert "PREFILL_PROBE" not in without.stderr
    assert with_probe.returncode == without.returncode != 0
    assert with_probe.stderr.strip().splitlines()[-1] == without.stderr.strip().splitlines()[-1]


def test_flags_reach_spawned_processes_by_the_environment() -> None:
    done = python(
        """
        import os, sys
        from freetoken.server import args
        model = sys.argv[1] if len(sys.argv) > 1 else None
        from prefill_probe.geometry import make_model
        import pathlib, tempfile
        with tempfile.TemporaryDirectory() as directory:
            path = make_model(pathlib.Path(directory), "flash-next-nvfp4", layers=4)
            parsed, _ = args.parse_args(["--model", str(path), "--prefill-probe", "warn",
                                         "--prefill-probe-margin", "1GiB", "--dummy-weight"])
        print(hasattr(parsed, "prefill_probe"), os.environ["PREFILL_PROBE"], os.environ["PREFILL_PROBE_MARGIN"])
        """
    )
    assert done.stdout.splitlines()[-1] == "False warn 1GiB", done.stderr


def test_an_engine_that_is_not_as_read_is_not_touched_and_says_so_once() -> None:
    done = python(
        """
        import freetoken.scheduler.scheduler as s
        del s.Scheduler._prepare_batch
        from freetoken.server import args, api_server
        for _ in range(2):
            try:
                args.parse_args(["--help"])
            except SystemExit:
                pass
        """
    )
    assert "--prefill-probe" not in done.stdout
    assert done.stderr.count("serves unprobed") == 1
    assert "Scheduler._prepare_batch" in done.stderr


def test_llm_with_a_bad_setting_fails_before_it_loads() -> None:
    done = python(
        """
        from freetoken.scheduler.scheduler import Scheduler
        try:
            Scheduler(None)
        except ValueError as error:
            print(error)
        """,
        PREFILL_PROBE="maybe",
    )
    assert done.stdout.startswith("PREFILL_PROBE: 'maybe' is not a mode"), done.stderr


# The end of a refused boot ------------------------------------------------------------------------------------------

SERVER = """
import multiprocessing as mp, os, sys, time

def worker(queue, how):
    if how == "named":
        queue.put(("error", "PrefillOOMError: a full prefill chunk does not fit this GPU."))
        queue.close(); queue.join_thread()
        sys.exit(1)
    if how == "other":
        queue.put(("error", "ValueError: something else")); queue.close(); queue.join_thread()
        sys.exit(1)
    if how in ("killed", "probing"):
        from pathlib import Path
        from prefill_probe.record import state_directory
        from prefill_probe.watch import Marker
        Marker(state_directory(os.environ), {"a": 1}).set()
        if sys.argv[1] == "probing":
            time.sleep(300)
        os.kill(os.getpid(), 9)
    if how == "left alone":
        from memory_engine import MIB, MemoryEngine
        from prefill_probe import ProbeSettings, probe
        from prefill_probe.record import default_report, write_record
        write_record(probe(MemoryEngine(100 * MIB), ProbeSettings()), default_report(os.environ))
        os._exit(78)

def deaf(queue):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)

def start():
    from freetoken.server.supervisor import BackendHandle
    mp.set_start_method("spawn", force=True)
    queue = mp.Queue()
    processes = [mp.Process(target=worker, args=(queue, sys.argv[1])), mp.Process(target=deaf, args=(queue,))]
    for process in processes:
        process.start()
    open(sys.argv[4], "w").write(" ".join(str(p.pid) for p in processes))
    return BackendHandle(ack_queue=queue, processes=processes, expected_acks=2)

if __name__ == "__main__":
    import torch
    from freetoken.distributed import DistributedInfo
    from freetoken.server import api_server
    from freetoken.server.args import ServerArgs
    api_server.BACKEND_DEATH_EXIT_GRACE_S = 1.0
    config = ServerArgs(model_path=sys.argv[3], tp_info=DistributedInfo(0, 1), dtype=torch.bfloat16,
                        use_dummy_weight=True, server_port=int(sys.argv[2]))
    api_server.run_api_server(config, start, run_shell=False)
"""


def boot(how: str, directory: Path, port: int, open_connection: bool = False) -> tuple[int, list[int], float, str, str]:
    """The engine's real API server over workers that die; gives back status, children left, seconds, health, log."""
    from prefill_probe.geometry import make_model

    model = make_model(directory / "model", "flash-next-nvfp4", layers=4)
    script = directory / "server.py"
    script.write_text(SERVER)
    process = subprocess.Popen(
        [sys.executable, str(script), how, str(port), str(model), str(directory / "children")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT
        | {"XDG_STATE_HOME": str(directory / "state"), "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )
    health, died_at = "", None
    end = time.monotonic() + 90
    connection = None
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
                health = response.read().decode()
        except OSError as error:
            if hasattr(error, "read"):
                health = error.read().decode()
        if "error" in health and died_at is None:
            died_at = time.monotonic()
            if open_connection:
                import socket

                connection = socket.create_connection(("127.0.0.1", port))
                connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.1)
    seconds = time.monotonic() - (died_at or end)
    if connection is not None:
        connection.close()
    children = [int(pid) for pid in (directory / "children").read_text().split()]
    left = [pid for pid in children if _state(pid) != "Z"]
    try:
        os.killpg(process.pid, signal.SIGKILL)  # whatever is left would keep the log's pipe open
    except ProcessLookupError:
        pass
    log = process.communicate()[0]
    return process.returncode, left, seconds, health, log


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_who_is_killed_is_waited_for() -> None:
    """It holds its GPU memory until it is gone, and a unit that is restarted at once would not find it free."""
    done = python(
        """
        import multiprocessing, signal, time
        from types import SimpleNamespace
        from freetoken.server import api_server
        from engine_hooks.freetoken import exits

        def deaf(ready):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            taken = bytearray(1 << 30)  # takes its time to be given back
            ready.set()
            time.sleep(300)

        context = multiprocessing.get_context("fork")
        ready = [context.Event() for _ in range(2)]
        processes = [context.Process(target=deaf, args=(each,)) for each in ready]
        for process in processes:
            process.start()
        assert all(each.wait(60) for each in ready)
        api_server._GLOBAL_STATE = SimpleNamespace(backend_processes=processes)
        exits._reap(api_server)
        print([process.exitcode for process in processes])
        """
    )
    assert done.stdout.splitlines()[-1:] == ["[-9, -9]"], done.stderr


def test_a_refused_boot_ends_with_78_and_leaves_no_child_even_a_deaf_one(tmp_path: Path) -> None:
    status, left, seconds, health, log = boot("named", tmp_path, 19301)
    assert status == 78, log
    assert left == []
    assert seconds < 15
    assert "PrefillOOMError" in json.loads(health)["message"]


def test_a_client_that_holds_its_connection_open_does_not_keep_a_refused_boot_alive(tmp_path: Path) -> None:
    status, left, seconds, _, log = boot("named", tmp_path, 19302, open_connection=True)
    assert status == 78, log
    assert left == []
    assert seconds < 15


def test_a_rank_that_was_killed_in_the_middle_of_its_probe_ends_with_70_and_names_the_marker(tmp_path: Path) -> None:
    status, _, _, health, log = boot("killed", tmp_path, 19303)
    assert status == 70, log
    assert "PrefillFaultError" in health
    assert "unfinished-" in health


def test_a_rank_that_ended_by_itself_is_named_by_its_record(tmp_path: Path) -> None:
    status, left, _, health, log = boot("left alone", tmp_path, 19306)
    assert status == 78, log
    assert left == []
    assert "PrefillOOMError: a full prefill chunk does not fit this GPU" in json.loads(health)["message"]


@pytest.mark.slow
def test_any_other_death_ends_as_without_this_package(tmp_path: Path) -> None:
    status, _, _, _, log = boot("other", tmp_path, 19304)
    assert status == -signal.SIGTERM, log


def test_a_server_that_is_stopped_while_a_rank_probes_leaves_no_marker_and_ends_by_the_signal(tmp_path: Path) -> None:
    from prefill_probe.geometry import make_model

    model = make_model(tmp_path / "model", "flash-next-nvfp4", layers=4)
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    process = subprocess.Popen(
        [sys.executable, str(script), "probing", "19305", str(model), str(tmp_path / "children")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=ENVIRONMENT | {"XDG_STATE_HOME": str(tmp_path / "state")},
    )
    try:
        end = time.monotonic() + 90
        state = tmp_path / "state" / "prefill-probe"
        while time.monotonic() < end and not (list(state.glob("unfinished-*.json")) and _answers(19305)):
            time.sleep(0.1)
        assert len(list(state.glob("unfinished-*.json"))) == 1
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
        assert list(state.iterdir()) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError as error:
        return hasattr(error, "read")
