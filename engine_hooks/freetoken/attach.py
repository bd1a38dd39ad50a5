"""Attach to FreeToken: wait for its modules, wrap a function of each, touch nothing else.

* ``Scheduler.__init__``: the probe runs at its end, in every rank's process and in ``freetoken.llm.LLM``.
* ``server.args.parse_args``: the probe's flags.
* ``server.api_server``: the estimate before a start, and the exit status of one that the probe stopped.

An engine whose internals do not keep the contract is left alone, with one warning.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def install() -> None:
    """Wait for FreeToken's modules (called when ``freetoken`` itself is first imported)."""
    sys.meta_path.insert(0, _WaitForModules())


class _WaitForModules:
    """Lets the other finders find FreeToken's modules, and has a wrapper applied once one has been executed."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        wrapper = _WRAPPERS.get(name)
        if wrapper is None:
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and (find := getattr(finder, "find_spec", None)) is not None:
                spec = find(name, path, target)
                if spec is not None:
                    break
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _guarded(wrapper, module)

            loader.exec_module = exec_module
        return spec


def _guarded(wrapper: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Apply ``wrapper``; whatever goes wrong, the engine serves as without this package."""
    try:
        wrapper(module)
    except Exception as error:
        warn(f"{module.__name__} could not be wrapped: {error!r}")


@functools.cache
def warn(reason: str) -> None:
    """Say once that this engine is not probed, and why."""
    from importlib.metadata import version

    from prefill_probe import stages
    from prefill_probe.logs import get_logger

    text = f"FreeToken {version('freetoken')} is not as this hook knows it, and serves unprobed: {reason}"
    get_logger().warning(text)
    stages.tell(stages.UNPROBED, text)


def _wrap_scheduler(module: ModuleType) -> None:
    """Probe at the end of ``Scheduler.__init__``."""
    scheduler_class = module.Scheduler
    original = scheduler_class.__init__

    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        from engine_hooks.freetoken import boot

        boot.probed_init(original, self, config, *args, **kwargs)

    scheduler_class.__init__ = init


def _wrap_args(module: ModuleType) -> None:
    """Add the probe's flags to ``ft serve``."""
    original = module.parse_args

    @functools.wraps(original)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        from engine_hooks.freetoken import flags

        # Only now have all of the engine's modules been executed.
        if keeps_contract():
            return flags.parse_with_probe(module, original, *args, **kwargs)
        return original(*args, **kwargs)

    module.parse_args = parse_args  # type: ignore[attr-defined]


def _wrap_api_server(module: ModuleType) -> None:
    """Estimate a start, end a stopped one with the probe's exit status, answer what the guard refuses with 503."""
    from engine_hooks.freetoken import exits, preflight, unavailable, versions

    if not versions.missing({module.__name__: module}, versions.SERVER_CONTRACT):
        exits.wrap(module)
        preflight.wrap(module)
        module.app.add_middleware(unavailable.Unavailable)


def keeps_contract() -> bool:
    """Whether the engine's modules, as far as they are loaded, are what the hook knows; warns once if not."""
    from engine_hooks.freetoken import versions

    lacking = versions.missing(sys.modules, versions.CONTRACT | versions.SERVER_CONTRACT)
    if lacking:
        warn("it lacks " + ", ".join(lacking))
    return not lacking


_WRAPPERS: dict[str, Callable[[ModuleType], None]] = {
    "freetoken.scheduler.scheduler": _wrap_scheduler,
    "freetoken.server.args": _wrap_args,
    "freetoken.server.api_server": _wrap_api_server,
}
