"""The probe inside a boot: settings, run, record, verdict, and what it means for the engine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_hooks.freetoken import attach, planner, versions
from engine_hooks.freetoken.engine import FreeTokenEngine
from prefill_probe._probe import probe
from prefill_probe.logs import get_logger
from prefill_probe.record import ProbeRecord, default_report, write_record
from prefill_probe.render.text import error_for, log_line
from prefill_probe.settings import Mode, ProbeSettings


def probed_init(original: Callable[..., None], scheduler: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """``Scheduler.__init__``, and then the probe.

    Raises:
        ValueError: a bad setting, before anything is loaded.
        PrefillProbeError: the verdict stops the boot (mode ``enforce``).
    """
    settings = ProbeSettings.from_environ(os.environ)
    if settings.mode is Mode.OFF:
        original(scheduler, config, *args, **kwargs)
        return
    if not attach.keeps_contract():
        original(scheduler, config, *args, **kwargs)
        return
    with planner.tap(config) as noted:
        original(scheduler, config, *args, **kwargs)
    if scheduler.device.type != "cuda":
        return
    lacking = versions.missing_attributes(scheduler)
    if lacking:
        attach.warn("its scheduler lacks " + ", ".join(lacking))
        return
    try:
        _probe(scheduler, noted, settings)
    except KeyboardInterrupt:
        if multiprocessing.parent_process() is None:
            raise
        # In a rank: the engine is being stopped, and a traceback of ours would only get in the way.
        get_logger().warning("interrupted during the probe")
        raise SystemExit(130) from None


def _probe(scheduler: Any, noted: planner.PlannerTap, settings: ProbeSettings) -> None:
    log = get_logger()
    primary = bool(scheduler.config.tp_info.is_primary())
    record = probe(FreeTokenEngine(scheduler, noted), settings, log.debug)
    if primary:
        _keep(record, settings.report or default_report(os.environ), log)
    error = error_for(record)
    if error is None:
        if primary:
            (log.warning if record.verdict == "tight" else log.info)(log_line(record))
        return
    if settings.mode is Mode.WARN:
        if primary:
            named = f"{type(error).__name__}: {error}"
            log.error(f"{log_line(record)}; serving all the same (--prefill-probe warn)\n{named}")
        return
    if primary:
        log.error(log_line(record))
    raise error


def _keep(record: ProbeRecord, path: Path, log: Any) -> None:
    """Write the record; a record that cannot be written changes no verdict."""
    try:
        write_record(record, path)
    except OSError as error:
        log.warning(f"the record could not be written: {error}")
    else:
        log.debug(f"record written to {path}")
