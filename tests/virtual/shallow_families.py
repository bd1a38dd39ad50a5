"""Reads every architecture that the installed engine registers at full depth and cut to its first layers.

    python shallow_families.py DIRECTORY

Prints one JSON object: architecture -> "as the first N", or what is different, or why it is not read at all.
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

LAYERS = 6


def compared(document: dict[str, Any], directory: Path) -> str:
    """What the engine reads of the first layers, against what it reads of all."""
    from freetoken.server.args import parse_args

    from prefill_probe.geometry import make_model
    from prefill_probe.shallow import shallow_config

    read = []
    for name, config in (("full", document), ("shallow", shallow_config(document, LAYERS))):
        model = make_model(directory / name, "qwen36-35b-a3b-bf16", layers=4)
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            read.append(parse_args(["--model", str(model), "--text-model-only"], prog="ft serve")[0].model_config)
        except Exception as error:
            return f"{name} not read: {type(error).__name__}: {error}"
    full, shallow = read
    wanted = [tuple(each for each in group.layer_ids if each < LAYERS) for group in full.attention_groups]
    same = shallow.num_layers == LAYERS and [tuple(group.layer_ids) for group in shallow.attention_groups] == wanted
    return f"as the first {LAYERS}" if same and full.num_layers > LAYERS else f"{shallow.num_layers} layers, {wanted}"


def main(directory: Path) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    logging.disable(logging.WARNING)
    from freetoken.models.register import _MODEL_REGISTRY

    from prefill_probe import geometry

    families.shortened = lambda config: config
    found = {}
    for architecture in _MODEL_REGISTRY:
        whole = architecture == "Qwen4ExpForConditionalGeneration"
        document = geometry.config("flash-next-nvfp4") if whole else families.document(architecture)
        if document is not None:
            found[architecture] = compared(json.loads(json.dumps(document)), directory / architecture)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
