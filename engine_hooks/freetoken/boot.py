"""The probe inside a boot: settings, run, record, verdict, and what it means for the engine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from engine_hooks.freetoken import attach, planner, switch, versions
from engine_hooks.freetoken.boot_stages import told
from engine_hooks.freetoken.engine import FreeTokenEngine
from engine_hooks.freetoken.guard import Guard
from engine_hooks.freetoken.routers import Perturbed
from prefill_probe import stages
from prefill_probe._probe import probe
from prefill_probe.adapt import Memory, adapted_probe, adapted_text
from prefill_probe.faults import PrefillFaultError, PrefillProbeError
from prefill_probe.guard import needs_of
from prefill_probe.logs import get_logger
from prefill_probe.meter import Peak, kept_peaks
from prefill_probe.metrics import ServerMetrics
from prefill_probe.record import ProbeRecord, default_report, state_directory, write_record
from prefill_probe.render.text import error_for, log_line
from prefill_probe.settings import Mode, ProbeSettings
from prefill_probe.watch import Marker, key_of


def probed_init(original: Callable[..., None], scheduler: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """``Scheduler.__init__``, and then the probe.

    Raises:
        ValueError: a bad setting, before anything is loaded.
        PrefillProbeError: the verdict stops the boot (mode ``enforce``).
    """
    settings = ProbeSettings.from_environ(os.environ)
    if settings.mode is not Mode.OFF and switch.is_off():
        get_logger().warning(f"the prefill probe is {switch.SWITCHED_OFF}")
        stages.tell(stages.UNPROBED, f"it is {switch.SWITCHED_OFF}")
        settings = ProbeSettings(mode=Mode.OFF)
    if settings.mode is Mode.OFF or not attach.keeps_contract():
        original(scheduler, config, *args, **kwargs)
        return
    with planner.tap(config) as noted, kept_peaks() as peaks, told():
        original(scheduler, config, *args, **kwargs)
    if scheduler.device.type != "cuda":
        return
    lacking = versions.missing_attributes(scheduler)
    if lacking:
        attach.warn("its scheduler lacks " + ", ".join(lacking))
        return
    try:
        _probe(scheduler, noted, peaks, settings)
    except PrefillProbeError:
        raise
    except Exception as error:
        # Nothing of the engine failed, or it would be a verdict: an engine that is whole serves as without the probe.
        text = f"the probe itself failed, and this start is not probed: {type(error).__name__}: {error}"
        get_logger().error(text)
        stages.tell(stages.UNPROBED, text)
    except KeyboardInterrupt:
        if multiprocessing.parent_process() is None:
            raise
        # In a rank: the engine is being stopped, and a traceback of ours would only get in the way.
        get_logger().warning("interrupted during the probe")
        raise SystemExit(128 + signal.SIGINT) from None


def _probe(scheduler: Any, noted: planner.PlannerTap, peaks: list[Peak], settings: ProbeSettings) -> None:
    log = get_logger()
    primary = bool(scheduler.config.tp_info.is_primary())
    engine = FreeTokenEngine(scheduler, noted, peaks)
    report = settings.report or default_report(os.environ)
    metrics = _metrics(settings, log) if primary else None
    with _marked(engine, settings.mode, primary, log) as marker:
        if marker is None:
            return

        def keep(last: ProbeRecord) -> None:
            _keep_last(_with_routers(last, routers), report, marker, log)
            if metrics is not None:
                metrics.found(last)

        def progress(text: str) -> None:
            log.debug(text)
            if primary:
                stages.tell(stages.CHUNK, text)

        with _perturbed_routers(engine) as routers:
            if settings.mode.adapts:
                memory = Memory(state_directory(os.environ) / f"adapted-{key_of(_configuration(engine))}.json")
                record = adapted_probe(engine, settings, memory, progress, keep)
            else:
                record = probe(engine, settings, progress, keep)
        record = _with_routers(record, routers)
        # A dead context, or a run that could not be undone: such an engine would serve wrong answers or none.
        damaged = any(engine.gather(engine.damaged))
    if primary:
        _keep(record, report, log)
    if metrics is not None:
        metrics.found(record)
    if stages.followed():
        if primary:
            stages.tell(stages.VERDICT)
        stages.hold()
    _conclude(engine, record, settings.mode, damaged, log if primary else None)
    if settings.guard:
        _guard(scheduler, engine, record, report, metrics, log)


def _metrics(settings: ProbeSettings, log: Any) -> ServerMetrics | None:
    """Of a server that serves: a ``check`` may run beside it with the same environment."""
    if settings.metrics is None or stages.followed():
        return None
    return ServerMetrics(settings.metrics, log.warning)


def _perturbed_routers(engine: FreeTokenEngine) -> AbstractContextManager[Perturbed | None]:
    """Only under ``check``, whose start serves nobody, and only of dummy weights: nobody else's are touched."""
    if stages.followed() and engine.config.use_dummy_weight:
        return engine.perturbed_routers()
    return contextlib.nullcontext()


def _with_routers(record: ProbeRecord, perturbed: Perturbed | None) -> ProbeRecord:
    """``record``, and that routing in it is not that of the dummy weights."""
    if perturbed is None or not (perturbed.routers or perturbed.left):
        return record
    notes = [f"the routers of {perturbed.routers} layers had other than their dummy weights"] * bool(perturbed.routers)
    notes += [f"routers with their dummy weights: {why}" for why in sorted(set(perturbed.left))]
    return replace(record, perturbed_routers=perturbed.routers, notes=[*record.notes, *notes])


def _conclude(engine: FreeTokenEngine, record: ProbeRecord, mode: Mode, damaged: bool, log: Any) -> None:
    """Say what was found (``log``: on the first rank), and return if the engine is to serve.

    Raises:
        PrefillProbeError: it is not.
    """
    error = error_for(record)
    if record.adapted is not None and not damaged:
        if log:
            log.warning(adapted_text(record, _command()))
        return
    if error is None:
        if log:
            (log.warning if record.verdict == "tight" else log.info)(log_line(record))
        return
    serving = mode is Mode.WARN and not damaged
    if log:
        log.error(log_line(record) + ("; serving all the same (--prefill-probe warn)" if serving else ""))
        if serving:
            log.error(f"{type(error).__name__}: {error}")
    if not serving:
        raise error from engine.last_fault


def _guard(
    scheduler: Any,
    engine: FreeTokenEngine,
    record: ProbeRecord,
    report: Path,
    metrics: ServerMetrics | None,
    log: Any,
) -> None:
    """Put the guard before every prefill, where this start's chunks say what one needs."""
    needs = needs_of(record)
    if needs is None:
        if engine.rank == 0:
            log.warning("no chunk came back, so nothing guards prefills: a long prompt will end the server")
        return

    def on_miss(text: str) -> None:
        missed = replace(record, miss=text)
        if engine.rank == 0:
            _keep(missed, report, log)
        if metrics is not None:
            metrics.found(missed)  # at once: the engine ends

    Guard(engine, needs, on_miss, metrics.counted if metrics else lambda counters: None).attach(scheduler)


def _configuration(engine: FreeTokenEngine) -> dict[str, Any]:
    identity = engine.identity()
    return {"model": identity.model, "flags": identity.flags, "gpu": identity.gpu["name"], "engine": identity.engine}


def _command() -> list[str]:
    """The command line as it was typed; a spawned rank has that of its server."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


@contextlib.contextmanager
def _marked(engine: FreeTokenEngine, mode: Mode, primary: bool, log: Any) -> Iterator[Marker | None]:
    """Keep a marker on disk while the block runs; yields it, or None where the probe is not wanted.

    It is not where an earlier probe of this configuration never came back (in mode ``warn``).

    Raises:
        PrefillFaultError: the same, in another mode.
    """
    marker = Marker(state_directory(os.environ), _configuration(engine))
    # The first rank looks; all do the same.
    left = engine.gather(str(marker.left_behind() or "") if primary else "")[0]
    if left:
        text = (
            "an earlier probe of this configuration never came back: its process was killed or the GPU was lost.\n"
            f"  marker       {left}\n"
            "It is not repeated by itself. To probe again: remove that file. To serve without it: --prefill-probe off"
        )
        if mode is not Mode.WARN:
            raise PrefillFaultError(text)
        if primary:
            log.warning(text)
        yield None
        return
    try:
        marker.set()
    except OSError as error:
        log.warning(f"no marker of an unfinished probe could be written: {error}")
    with _cleared_on_sigterm(marker):
        try:
            yield marker
        finally:
            marker.clear()


@contextlib.contextmanager
def _cleared_on_sigterm(marker: Marker) -> Iterator[None]:
    """A process that is stopped during the probe has not been killed by it.

    Only in a process of its own (``LLM``): a rank dies by SIGTERM at once, also inside a C call, and the server that
    sent it clears the marker (``exits``).
    """
    if threading.current_thread() is not threading.main_thread() or multiprocessing.parent_process() is not None:
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        marker.clear()
        signal.signal(signum, previous or signal.SIG_DFL)
        signal.raise_signal(signum)

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _keep(record: ProbeRecord, path: Path, log: Any) -> None:
    """Write the record; a record that cannot be written changes no verdict."""
    try:
        write_record(record, path)
    except OSError as error:
        log.warning(f"the record could not be written: {error}")
    else:
        log.debug(f"record written to {path}")


def _keep_last(record: ProbeRecord, path: Path, marker: Marker, log: Any) -> None:
    """Log and write the record of a probe that cannot come back (called from another thread; the process ends).

    The marker of a chunk that hangs stays. One that failed on this rank alone is a verdict like any other.
    """
    log.error(f"{type(error_for(record)).__name__}: {error_for(record)}")
    _keep(record, path, log)
    if record.fault is None or record.fault.kind != "time-out":
        marker.clear()
