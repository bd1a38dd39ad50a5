"""Geometries that ship with the package: a model directory with a real ``config.json`` and no weights.

They stand for published models in checks with dummy weights, where only shapes count.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from prefill_probe.geometry import tokenizer

# GDN and attention with experts, NVFP4 and bf16; the same with a dense MLP; attention alone with experts.
NAMES = (
    "flash-next-nvfp4",
    "qwen36-35b-a3b-nvfp4",
    "qwen36-35b-a3b-bf16",
    "qwen36-27b-bf16",
    "qwen3-30b-a3b-bf16",
)


def config(name: str, *, layers: int | None = None) -> dict[str, Any]:
    """The ``config.json`` of a geometry, with the first ``layers`` layers only where that is given.

    Raises:
        ValueError: no such geometry, or fewer than one layer.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a geometry; there are {', '.join(NAMES)}")
    document: dict[str, Any] = json.loads(files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    if layers is not None:
        if layers < 1:
            raise ValueError(f"a model has at least one layer, not {layers}")
        text = _text(document)
        text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:layers]
    return document


def _text(document: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a ``config.json``."""
    text: dict[str, Any] = document.get("text_config", document)
    return text


def make_model(directory: Path, name: str, *, layers: int | None = None) -> Path:
    """Write a model directory that an engine accepts with dummy weights: ``config.json`` and a toy tokenizer.

    A prompt of n ``tokenizer.words`` is a prompt of n tokens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    document = config(name, layers=layers)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokenizer.END,
        "eos_token": tokenizer.END,
        "model_max_length": _text(document)["max_position_embeddings"],
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    for file, content in (
        ("config.json", document),
        ("tokenizer.json", tokenizer.document()),
        ("tokenizer_config.json", settings),
    ):
        (directory / file).write_text(json.dumps(content), encoding="utf-8")
    return directory
