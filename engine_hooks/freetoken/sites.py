"""Where in the engine an error was raised, in a person's words."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import PurePath

from prefill_probe.composition import Frame
from prefill_probe.faults import chain_of

# Part of a source path below the package, without a model's own folder, or of a function's name -> the component and
# the step. First match wins.
_PLACES: tuple[tuple[str, str], ...] = (
    ("causal_conv1d", "GDN causal conv"),
    ("gdn.py _conv_prefill", "GDN causal conv"),
    ("chunk_delta_h", "GDN chunk_delta_h"),
    ("wy_fast", "GDN wy_fast"),
    ("solve_tril", "GDN solve_tril"),
    ("chunk_scaled_dot_kkt", "GDN chunk_scaled_dot_kkt"),
    ("chunk_o", "GDN chunk_o"),
    ("cumsum", "GDN cumsum"),
    ("l2norm", "GDN l2norm"),
    ("kernel/fla/kda", "KDA"),
    ("kernel/fla/", "GDN"),
    ("gated_delta", "GDN"),
    ("linear_attn", "GDN"),
    ("attention/linear", "GDN"),
    ("/gdn", "GDN"),
    ("/kda", "KDA"),
    ("/ple", "PLE"),
    ("hc.py", "hyper-connections"),
    ("moe", "MoE"),
    ("expert", "MoE"),
    ("qsa", "QSA attention"),
    ("dsa", "DSA attention"),
    ("attention", "attention"),
    ("attn", "attention"),
    ("lm_head", "head"),
    ("embedding", "embedding"),
    ("sample", "sampler"),
    ("sampling", "sampler"),
    ("vision", "encoder"),
    ("linear", "linear layer"),
    ("layernorm", "norm"),
    ("norm", "norm"),
    ("models/model.py", "hidden states"),
)

_MODEL = re.compile(r"^models/[^/]+/")

# Components of a peak, by the first word of a place.
_COMPONENTS = {
    "GDN": "GDN", "KDA": "KDA", "MoE": "MoE", "QSA": "attention", "DSA": "attention", "attention": "attention",
    "PLE": "embedding", "embedding": "embedding", "head": "head", "sampler": "sampler", "encoder": "encoder",
    "hyper-connections": "hyper-connections", "hidden": "hidden states",
}  # fmt: skip


def site_of(error: BaseException) -> str:
    """The component whose code raised ``error``, with the innermost line of the engine; empty outside of it.

    After a fault of the device whatever tidies up fails as well, outside of the engine: then that of the error behind
    it. One that came out of the engine is not looked behind, where there may be a cache that missed.
    """
    for each in chain_of(error):
        stack = traceback.extract_tb(each.__traceback__)
        if place := place_of([(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack)])[1]:
            return place
    return ""


def place_of(frames: Sequence[Frame]) -> tuple[str, str]:
    """The component and the place of a stack, innermost frame first; ``("other", "")`` outside of the engine.

    The place is that of the innermost frame that is known. The component may be further out: a linear layer or a
    norm belongs to whatever uses it.
    """
    ours = [frame for frame in frames if "/freetoken/" in frame[0] and "/engine_hooks/" not in frame[0]]
    places = []
    for file, line, function in ours:
        path = file.rpartition("/freetoken/")[2]
        # The scheduler and the engine are on every stack; they are the place only if nothing below them is.
        if path.startswith(("scheduler/", "engine/engine", "llm/", "server/")):
            continue
        # A model is named after its parts ("qwen3_5_moe"): its folder says nothing of the file in it.
        where = f"{_MODEL.sub('models/', path)} {function}".lower()
        places += [(name, f"{name} ({PurePath(path).name}:{line})") for part, name in _PLACES if part in where][:1]
    component = next((_COMPONENTS[word] for name, _ in places if (word := name.split()[0]) in _COMPONENTS), "other")
    if places:
        return component, places[0][1]
    return component, f"{ours[0][2]} ({PurePath(ours[0][0]).name}:{ours[0][1]})" if ours else ""
