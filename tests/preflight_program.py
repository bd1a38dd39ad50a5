"""A preflight's child process that does what its request says."""

from __future__ import annotations

import os
import time

from prefill_probe.preflight import Prediction, Unpredicted, answer

_OUT = 0  # where its answer goes
FOUND = Prediction("a card", 15 << 30, 16 << 30, 8192, "full chunk", 1640 << 20, 552 << 20)


def _predict(request: str) -> Prediction:
    print("what the engine prints")
    os.write(1, b"and what a library prints\n")
    if request == "hangs":
        time.sleep(600)
    if request == "dies":
        os.kill(os.getpid(), 9)
    if request == "babbles":
        os.write(_OUT, b'{"card": "a ca')
        os._exit(3)
    if request == "fails":
        raise RuntimeError("an engine\nthat fails")
    if request == "no gpu":
        raise Unpredicted("no CUDA GPU answers", quiet=True)
    parent = os.getppid()
    as_parent = os.getpriority(os.PRIO_PROCESS, parent), os.sched_getscheduler(parent)
    gives_way = (19, os.SCHED_IDLE) if request == "beside" else as_parent
    assert (os.nice(0), os.sched_getscheduler(0)) == gives_way
    return FOUND


def main() -> None:
    global _OUT
    _OUT = os.dup(1)
    answer(_predict)
