"""How ``ft serve`` ends when the probe stopped its start: by exit status, in bounded time, leaving nothing behind.

Without this the engine sends itself SIGTERM after a worker's death, which systemd reads as a clean stop.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from types import FrameType, ModuleType
from typing import Any

from prefill_probe.faults import EX_CONFIG, EX_SOFTWARE, exit_status_of
from prefill_probe.record import ProbeRecord, RecordError, default_report, read_record, state_directory
from prefill_probe.render.text import error_for
from prefill_probe.settings import ProbeSettings
from prefill_probe.watch import marker_of

# After the engine's own grace period: how long an orderly shutdown may take before it is cut short.
_SHUTDOWN_SECONDS = 2.0
# How long a killed process may take to go: longer only in a driver's call that cannot be interrupted.
_GONE_SECONDS = 10.0


def wrap(module: ModuleType) -> None:
    """Wrap ``run_api_server`` and ``_exit_after_backend_death`` of ``freetoken.server.api_server``."""
    server: Any = module
    started = time.time()
    run, exit_after = server.run_api_server, server._exit_after_backend_death

    def status() -> int | None:
        """The exit status that the probe asks for; None if this is not the probe's doing."""
        text = getattr(server._GLOBAL_STATE, "fatal_error", None) or ""
        codes = [process.exitcode for process in _workers(server)]
        # A rank that was ended from another thread, by the deadline or left alone by the others, can say nothing.
        return exit_status_of(text) or next((code for code in (EX_CONFIG, EX_SOFTWARE) if code in codes), None)

    def name_the_unfinished() -> None:
        """A rank that died in the middle of a probe could not say so: its record does, or else its marker."""
        state = server._GLOBAL_STATE
        if exit_status_of(getattr(state, "fatal_error", None) or "") is not None:
            return
        if text := _recorded_miss(started):
            # The engine ended by a prefill that the guard let through: as without this package, but by name.
            state.fatal_error = f"{getattr(state, 'fatal_error', None) or 'a rank ended'}: {text}"
            return
        if status() is not None and (text := _recorded_error(started)):
            state.fatal_error = text
            server.logger.error("%s", text)
            return
        for process in _workers(server):
            marker = marker_of(state_directory(os.environ), process.pid) if process.exitcode is not None else None
            if marker is not None:
                hung = process.exitcode in (EX_SOFTWARE, 1)
                name = "PrefillTimeoutError" if hung else "PrefillFaultError"
                how = "hung" if hung else f"ended with status {process.exitcode}"
                state.fatal_error = f"{name}: the prefill probe {how} and was not finished; marker: {marker}"
                server.logger.error("%s", state.fatal_error)

    def forget_the_stopped() -> None:
        """Ranks that this server was told to stop in the middle of a probe were not killed by it."""
        for process in _workers(server):
            marker = marker_of(state_directory(os.environ), process.pid)
            if marker is not None:
                marker.unlink(missing_ok=True)

    @functools.wraps(run)
    def run_api_server(*args: Any, **kwargs: Any) -> Any:
        previous = signal.getsignal(signal.SIGTERM)

        def on_sigterm(signum: int, frame: FrameType | None) -> None:
            # uvicorn raises the signal again once it has shut down: here the engine would die by it.
            code = status()
            if code is None:
                forget_the_stopped()
                signal.signal(signum, previous or signal.SIG_DFL)
                signal.raise_signal(signum)
                return
            _reap(server)
            raise SystemExit(code)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        try:
            return run(*args, **kwargs)
        finally:
            if status() is None:
                forget_the_stopped()

    @functools.wraps(exit_after)
    def exit_after_backend_death(grace_s: float) -> Any:
        name_the_unfinished()
        code = status()
        if code is not None:
            threading.Thread(target=cut_short, args=(grace_s, code), daemon=True).start()
        return exit_after(grace_s)

    def cut_short(grace_s: float, code: int) -> None:
        """A client that holds its connection open must not keep a dead server alive."""
        time.sleep(grace_s + _SHUTDOWN_SECONDS)
        _reap(server)
        os._exit(code)

    server.run_api_server, server._exit_after_backend_death = run_api_server, exit_after_backend_death


def _record(since: float) -> ProbeRecord | None:
    """The record, if it was written after ``since`` (seconds of the clock)."""
    try:
        path = ProbeSettings.from_environ(os.environ).report or default_report(os.environ)
        return read_record(path) if path.stat().st_mtime >= since else None
    except (OSError, ValueError, RecordError):
        return None


def _recorded_error(since: float) -> str:
    """The named error of the record of this start; empty if there is none."""
    record = _record(since)
    error = error_for(record) if record is not None else None
    return "" if error is None else f"{type(error).__name__}: {error}"


def _recorded_miss(since: float) -> str:
    """What this start's record says of a prefill that ran out of memory later; empty if none did."""
    record = _record(since)
    return f"PrefillOOMError: {record.miss}" if record is not None and record.miss else ""


def _workers(server: Any) -> list[Any]:
    """The server's child processes; none before it has started them."""
    return list(getattr(server._GLOBAL_STATE, "backend_processes", ()))


def _reap(server: Any) -> None:
    """End what still lives, and wait until it is gone: a killed process keeps its GPU memory until it is."""
    processes = _workers(server)
    server._terminate_backend_workers(processes)
    server._reap_backend_workers(processes, timeout=1.0)
    end = time.monotonic() + _GONE_SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
