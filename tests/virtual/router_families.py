"""The routers of every architecture that the installed engine registers, in a model without memory.

router_families.py DIRECTORY     One JSON document on standard output: architecture -> MoE layers, routers that have
weights of (experts, hidden size), or what stops it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import families

ARGUMENTS = ["--text-model-only", "--dummy-weight", "--moe-strategy", "offload"]


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    logging.disable(logging.WARNING)
    import torch
    from freetoken.distributed import set_tp_info
    from freetoken.layers import set_rope_device
    from freetoken.models.register import _MODEL_REGISTRY

    set_tp_info(rank=0, size=1)
    set_rope_device(torch.device("cpu"))
    found: dict[str, Any] = {}
    for architecture in _MODEL_REGISTRY:
        config = families.document(architecture)
        try:
            found[architecture] = None if config is None else counted(Path(sys.argv[1]) / architecture, config)
        except Exception as error:
            found[architecture] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps(found))


def counted(directory: Path, document: dict[str, Any]) -> list[int]:
    import torch
    from freetoken.layers.moe import MoELayer
    from freetoken.models import create_model
    from freetoken.utils.torch_utils import torch_dtype

    from engine_hooks.freetoken import compressed
    from engine_hooks.freetoken.routers import routers_of
    from engine_hooks.freetoken.virtual import parsed

    config = parsed(["--model", str(families.make_family(directory, document)), *ARGUMENTS])
    with torch.device("meta"), torch_dtype(config.dtype), compressed.answered(config):
        object.__setattr__(config.model_config, "moe_strategy", config.moe_strategy)
        object.__setattr__(config.model_config, "decode_target", "gpu")
        model = create_model(config.model_config)
    layers: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, MoELayer):
            layers.append(value)
        elif isinstance(value, list | tuple):
            for each in value:
                look(each)
        elif type(value).__module__.startswith(("freetoken.models", "freetoken.layers")):
            for each in vars(value).values():
                look(each)

    look(model)
    expected = {(layer.num_experts, layer.hidden_size) for layer in layers}
    routers = routers_of(model)
    return [len(layers), sum(each.weight is not None and tuple(each.weight.shape) in expected for each in routers)]


if __name__ == "__main__":
    main()
