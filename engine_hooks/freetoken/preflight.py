"""The estimate before a start of ``ft serve``: in the server's process, before a rank is spawned."""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from engine_hooks.freetoken import switch
from prefill_probe import driver
from prefill_probe.faults import PrefillOOMError
from prefill_probe.logs import get_logger
from prefill_probe.preflight import Child, Unpredicted
from prefill_probe.settings import Mode, Preflight, ProbeSettings


def wrap(module: ModuleType) -> None:
    """Wrap ``run_api_server`` of ``freetoken.server.api_server``, which spawns the ranks."""
    server: Any = module
    run = server.run_api_server

    @functools.wraps(run)
    def run_api_server(config: Any, *args: Any, **kwargs: Any) -> Any:
        before_start(config, over=lambda: getattr(server._GLOBAL_STATE, "maintenance_state", "loading") != "loading")
        return run(config, *args, **kwargs)

    server.run_api_server = run_api_server


def before_start(config: Any, over: Callable[[], bool]) -> None:
    """Estimate a start with ``config`` (``ServerArgs``), and log what comes of it.

    ``over``: whether the load has ended by now, one way or the other. An estimate that comes after it is not logged.

    Raises:
        SystemExit: a shortage that is clear, in mode ``refuse``; its status is 78. Nothing else is raised.
    """
    log = get_logger()
    try:
        settings = ProbeSettings.from_environ(os.environ)
        if settings.preflight is Preflight.OFF or settings.mode is Mode.OFF or switch.is_off():
            return
        if config.tp_info.size > 1:
            log.info("no preflight: tensor parallelism is not estimated")
            return
        # A mode that adapts serves with a smaller chunk or smaller caches: nothing is refused before it could.
        refuse = settings.preflight is Preflight.REFUSE and not settings.mode.adapts
        which = (getattr(config, "gpu_assigned", None) or getattr(config, "gpu", None) or ("0",))[0]
        request = (pickle.dumps(config), which, driver.free_bytes())
        child = Child("engine_hooks.freetoken.predict", request, beside=not refuse)
        if not refuse:
            threading.Thread(target=_log, args=(child, over), daemon=True, name="prefill-probe preflight").start()
            return
        refusal = _log(child, over, refuse=True)
    except Exception as error:
        log.info(f"no preflight: {type(error).__name__}: {error}")
        return
    if refusal:
        log.error(f"{PrefillOOMError.__name__}: {refusal}")
        raise SystemExit(PrefillOOMError.exit_status)


def _log(child: Child, over: Callable[[], bool], *, refuse: bool = False) -> str:
    """Log the prediction once it is there, or why there is none; the text of a refusal, if it is one, instead."""
    log = get_logger()
    try:
        prediction = child.prediction()
    except Unpredicted as none:
        (log.debug if none.quiet or over() else log.info)(f"no preflight: {none}")
        return ""
    if refuse and prediction.is_clear:
        return prediction.refusal()
    if not over():
        (log.warning if prediction.short_bytes else log.info)(prediction.line())
    return ""
