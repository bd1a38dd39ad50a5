"""A preflight's child process that does what its request says."""

from __future__ import annotations

import os
import time

from prefill_probe.preflight import Prediction, Unpredicted, answer

FOUND = Prediction("a card", 15 << 30, 16 << 30, 8192, "full chunk", 1640 << 20, 552 << 20)


def _predict(request: str) -> Prediction:
    print("what the engine prints")
    os.write(1, b"and what a library prints\n")
    if request == "hangs":
        time.sleep(600)
    if request == "dies":
        os.kill(os.getpid(), 9)
    if request == "fails":
        raise RuntimeError("an engine\nthat fails")
    if request == "no gpu":
        raise Unpredicted("no CUDA GPU answers", quiet=True)
    assert os.nice(0) == (19 if request == "beside" else 0)
    return FOUND


def main() -> None:
    answer(_predict)
