"""Greedy tokens of fixed prompts through ``freetoken.llm.LLM``; one JSON line on standard output.

generate.py MODEL CHUNK MODE        (the probe's mode is taken from the environment)
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from quick.tame import tame_weights

PROMPTS = (16, 63, 64, 65, 500, 700, 1500, 2048, 4100, 6000)


def build(model: str, chunk: int, **changes: Any) -> Any:
    """An offline engine of the incident's configuration."""
    import torch
    from freetoken.llm import LLM

    arguments: dict[str, Any] = {
        "max_running_req": 1,
        "cuda_graph_max_bs": 1,
        "moe_cache_size": 512,
        "moe_prefill_overlap": False,
        "memory_ratio": 0.95,
        "max_extend_tokens": chunk,
        "use_dummy_weight": True,
    } | changes
    try:
        from freetoken.mm.config import MultimodalConfig

        arguments["mm"] = MultimodalConfig(disabled_encoders=frozenset({"vision"}))
    except ImportError:
        pass  # before 0.1.3 there is no encoder to leave out
    with torch.inference_mode():
        return LLM(model, dtype=torch.bfloat16, **arguments)


def tame(llm: Any) -> None:
    """``tame_weights`` of an engine that is there already."""
    tame_weights(llm.engine.model.state_dict())


def prompts() -> list[list[int]]:
    """Fixed prompts; the sixth begins with the fifth."""
    pick = random.Random(7)
    rows = [[pick.randrange(2, 32000) for _ in range(length)] for length in PROMPTS]
    rows[5] = rows[4] + rows[5][len(rows[4]) :]
    return rows


def main() -> None:
    import torch
    from freetoken.core import SamplingParams

    model, chunk = sys.argv[1], int(sys.argv[2])
    llm = build(model, chunk)
    with torch.inference_mode():
        tame(llm)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with torch.inference_mode():
        rows = [llm.generate([prompt], sampling)[0]["token_ids"] for prompt in prompts()]
    llm.cache_manager.check_integrity()
    print(json.dumps({"tokens": rows, "integrity": "checked"}))


if __name__ == "__main__":
    main()
