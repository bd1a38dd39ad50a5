"""On PYTHONPATH: the ranks of an ``ft serve`` find a virtual GPU of ``VIRTUAL_VRAM`` (``15.5GiB``).

The driver, which the estimate before a start asks, knows a card of ``VIRTUAL_CARD``, if that is set.
Ranks load until the file ``VIRTUAL_LOAD`` is there, if that is set.

All of the engine's own processes run, on a machine without a GPU: server, tokenizers, ranks. A chunk takes the memory
that it would take; what it computes means nothing. Give ``--dummy-weight``. Another process on that GPU is a file,
``VIRTUAL_NEIGHBOUR``, that holds how many bytes it wants. Each rank has a GPU of its own; with
``VIRTUAL_NEIGHBOUR_RANK`` the process is on that rank's alone, and takes ``VIRTUAL_NEIGHBOUR_TAKES`` MiB more as soon
as there are CUDA graphs. Once the file ``VIRTUAL_RUNS_OUT`` is there, blocks of 8 MiB or more are not to be had,
whatever is free, but for the guard's own.
With ``VIRTUAL_HANG``, the state directory, an allocation does not come back while a probe's marker stands there.
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
    import time
    from pathlib import Path

    loaded = os.environ.get("VIRTUAL_LOAD")
    while loaded and "spawn_main" in "".join(sys.orig_argv) and not Path(loaded).exists():
        time.sleep(0.1)
    _entered = contextlib.ExitStack()
    from prefill_probe.sizes import parse_size
    from prefill_probe.virtual import virtual_gpu
    from prefill_probe.virtual.cards import card_of

    device = _entered.enter_context(virtual_gpu(card_of(parse_size(os.environ["VIRTUAL_VRAM"]), (12, 0))))
    if neighbour := os.environ.get("VIRTUAL_NEIGHBOUR"):
        alone, asked, taken = device._free_beside, 0, 0

        def beside(reserved):
            nonlocal asked, taken
            from freetoken.distributed import get_tp_info

            if os.environ.get("VIRTUAL_NEIGHBOUR_RANK", str(get_tp_info().rank)) != str(get_tp_info().rank):
                return alone(reserved)
            with open(neighbour) as file:  # noqa: PTH123
                held = int(file.read() or 0)
            if device.allocator.graph_bytes():
                held += int(os.environ.get("VIRTUAL_NEIGHBOUR_TAKES", "0")) << 20
            if held != asked:  # it asks once, and gets what is free at that moment
                asked, taken = held, min(held, max(taken, alone(reserved)))
            return alone(reserved) - taken

        device.allocator._device_free = beside

    if runs_out := os.environ.get("VIRTUAL_RUNS_OUT"):
        import torch

        given = device.allocate

        def refuse(size):
            if size >= 8 << 20 and Path(runs_out).exists():
                frame = sys._getframe()
                while frame and frame.f_code.co_name not in ("_hold", "_decode_memory"):
                    frame = frame.f_back
                if not frame:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size >> 20}.00 MiB.")
            return given(size)

        device.allocate = refuse

    if state := os.environ.get("VIRTUAL_HANG"):
        allocate = device.allocate

        def hang(size):
            while list(Path(state).glob("unfinished-*.json")):
                time.sleep(0.1)
            return allocate(size)

        device.allocate = hang

    from engine_hooks.freetoken.virtual import answered

    _entered.enter_context(answered())


def _answer_as_driver(size):
    from prefill_probe import driver
    from prefill_probe.sizes import parse_size
    from prefill_probe.virtual.cards import card_of

    driver.free_bytes = lambda: {}
    driver.card_at = lambda which, free: card_of(parse_size(size), (12, 0), "a card of the test")


if os.environ.get("VIRTUAL_CARD"):
    _answer_as_driver(os.environ["VIRTUAL_CARD"])
# What plans or estimates on a virtual GPU has its own.
_OWN = ("engine_hooks.freetoken.full_depth", "engine_hooks.freetoken.predict")
if os.environ.get("VIRTUAL_VRAM") and not any(name in word for word in sys.orig_argv for name in _OWN):
    sys.meta_path.insert(0, _WaitForScheduler)
