"""Where in the engine an error was raised, in a person's words."""

from __future__ import annotations

import traceback
from pathlib import PurePath

# Part of a source path below the package (or of a function's name) -> the component and the step. First match wins.
_PLACES: tuple[tuple[str, str], ...] = (
    ("causal_conv1d", "GDN causal conv"),
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
    ("ple", "PLE"),
    ("triton/hc", "hyper-connections"),
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
)


def site_of(error: BaseException) -> str:
    """The component whose code raised ``error``, with the innermost line of the engine; empty outside of it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/freetoken/" in frame.filename]
    frames = [frame for frame in frames if "/engine_hooks/" not in frame.filename]
    if not frames:
        return ""
    for frame in reversed(frames):
        path = frame.filename.rpartition("/freetoken/")[2]
        # The scheduler and the engine are on every stack; they are the place only if nothing below them is.
        if path.startswith(("scheduler/", "engine/engine", "llm/", "server/")):
            continue
        where = f"{path} {frame.name}".lower()
        for part, name in _PLACES:
            if part in where:
                return f"{name} ({PurePath(path).name}:{frame.lineno})"
    innermost = frames[-1]
    return f"{innermost.name} ({PurePath(innermost.filename).name}:{innermost.lineno})"
