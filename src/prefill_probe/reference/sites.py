"""Where in the reference engine memory was asked for, in a person's words."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import PurePath

from prefill_probe.composition import Frame

_HERE = "/prefill_probe/reference/"
_KERNELS = "/fla/"
# File of the reference engine -> component; in model.py and engine.py the function decides.
_FILES = {"gdn.py": "gdn", "attention.py": "attention", "moe.py": "moe"}
_FUNCTIONS = {"_scores": "head", "_embed": "embedding", "_sample": "sampler", "_normed": "norm"}


def site_of(error: BaseException) -> str:
    """The component whose code raised ``error``, and its innermost line; empty outside of the engine."""
    stack = traceback.extract_tb(error.__traceback__)
    return place_of([(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack)])[1]


def place_of(frames: Sequence[Frame]) -> tuple[str, str]:
    """The component and the place of a stack, innermost frame first; ``("other", "")`` outside of the engine."""
    ours = [frame for frame in frames if _HERE in frame[0] or _KERNELS in frame[0]]
    if not ours:
        return "other", ""
    names = (_component(file, function) for file, _, function in ours)
    component = next(filter(None, names), "other")
    # Of a library's decorators and wrappers, the function that asked for the memory.
    file, line, function = ours[0]
    return component, f"{component} {function.lstrip('_')} ({PurePath(file).name}:{line})"


def _component(file: str, function: str) -> str:
    name = PurePath(file).name
    if _HERE not in file:
        return ""
    return _FILES.get(name) or _FUNCTIONS.get(function, "")
