"""On PYTHONPATH: the ranks of an ``ft serve`` find a virtual GPU of ``VIRTUAL_VRAM`` (``15.5GiB``).

Its driver, which the estimate before a start asks, knows a card of ``VIRTUAL_CARD``, if that is set.

All of the engine's own processes run, on a machine without a GPU: server, tokenizers, ranks. A chunk takes the memory
that it would take; what it computes means nothing. Give ``--dummy-weight``.
"""

import os
import sys


class _WaitForScheduler:
    """Before a process imports the engine's scheduler, which ranks do, it gets the virtual GPU."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "freetoken.scheduler":
            sys.meta_path.remove(cls)
            _enter()


def _enter():
    global _entered  # never left: the process ends with it
    import contextlib

    _entered = contextlib.ExitStack()
    from prefill_probe.sizes import parse_size
    from prefill_probe.virtual import virtual_gpu
    from prefill_probe.virtual.cards import card_of

    _entered.enter_context(virtual_gpu(card_of(parse_size(os.environ["VIRTUAL_VRAM"]), (12, 0))))

    from engine_hooks.freetoken.virtual import answered

    _entered.enter_context(answered())


def _answer_as_driver(size):
    from prefill_probe import driver
    from prefill_probe.sizes import parse_size
    from prefill_probe.virtual.cards import card_of

    driver.free_bytes = lambda: {"GPU-0": parse_size(size)}
    driver.card_at = lambda which, free: card_of(free["GPU-0"], (12, 0), "a card of the test")


if os.environ.get("VIRTUAL_CARD"):
    _answer_as_driver(os.environ["VIRTUAL_CARD"])
# The estimate's process has a virtual GPU of its own.
if os.environ.get("VIRTUAL_VRAM") and not any("freetoken.predict" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, _WaitForScheduler)
