"""Read by site at the start of every interpreter of the environment: it must cost next to nothing.

It waits for ``import freetoken``; an interpreter that never does that meets one small object on ``sys.meta_path``.
"""

import sys


class _WaitForFreeToken:
    """Finds nothing itself; when FreeToken is first imported it steps aside for the hook."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]  # typing would cost an import
        if name == "freetoken":
            sys.meta_path.remove(cls)
            try:
                from engine_hooks.freetoken import attach

                attach.install()
            except Exception as error:
                print(f"prefill-probe: not attached to FreeToken: {error!r}", file=sys.stderr)


sys.meta_path.insert(0, _WaitForFreeToken)
