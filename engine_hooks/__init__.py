"""One folder an engine: the only code that knows that engine.

Site imports this module at the start of every interpreter of the environment (``prefill_probe_hook.pth``), so it must
cost next to nothing: it waits for an engine to be imported, and an interpreter that never does that meets one small
object on ``sys.meta_path``.
"""

import sys

# The engine's package -> the module whose ``install`` attaches its hook.
ENGINES = {"freetoken": "engine_hooks.freetoken.attach"}


class _WaitForEngine:
    """Finds nothing itself; when an engine is first imported it steps aside for that engine's hook."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]  # typing would cost an import
        if name in ENGINES:
            sys.meta_path.remove(cls)
            try:
                __import__(ENGINES[name])
                sys.modules[ENGINES[name]].install()
            except Exception as error:
                print(f"prefill-probe: not attached to {name}: {error!r}", file=sys.stderr)


sys.meta_path.insert(0, _WaitForEngine)
