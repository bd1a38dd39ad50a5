"""A shallow model: a directory with the first layers of a model in its ``config.json``, and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefill_probe.sizes import MIB
from prefill_probe.virtual.errors import ModelError
from prefill_probe.virtual.model_directory import checked

_DEPTH = "num_hidden_layers"
# Parts of a multimodal configuration that hold, or are, that of the language model.
_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")
# Lists in these are by dimension or by name, not by layer.
_NOT_BY_LAYER = ("rope", "vision", "audio", "quantization")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".h5", ".msgpack", ".onnx")
# No tokenizer is as large; whatever its name says, such a file is weights.
_LARGEST_BYTES = 256 * MIB


def shallow_config(document: dict[str, Any], layers: int) -> dict[str, Any]:
    """A ``config.json`` whose language model has its first ``layers`` layers.

    Whatever says something of each layer is cut: lists as long as the model is deep, lists of layers' numbers, objects
    by number. What a model's layers are made of is the engine's to say: compare what it reads of the two.

    Raises:
        ModelError: the document does not say how deep the model is.
    """
    reduced = _section(document, layers)
    if reduced == document:
        raise ModelError(f'config.json cannot be reduced: it has no "{_DEPTH}" above {layers}')
    return reduced


def _section(section: dict[str, Any], layers: int) -> dict[str, Any]:
    depth = section.get(_DEPTH)
    ahead = section.get("num_nextn_predict_layers") or 0  # some lists go on over the layers that predict further tokens
    found: dict[str, Any] = {}
    for key, value in section.items():
        if key in _SECTIONS and isinstance(value, dict):
            found[key] = _section(value, layers)
        elif isinstance(depth, int) and depth > layers and not key.startswith(_NOT_BY_LAYER):
            found[key] = layers if key == _DEPTH else _cut(key, value, range(depth, depth + ahead + 1), layers)
        else:
            found[key] = value
    return found


def _cut(key: str, value: Any, depths: range, layers: int) -> Any:
    if isinstance(value, list) and len(value) in depths:
        return value[:layers]
    if isinstance(value, list) and "layer" in key and all(type(number) is int for number in value):
        return [number for number in value if number <= layers]  # some count from 1
    if isinstance(value, dict) and "layer" in key and all(name.isdigit() for name in value):
        return {name: each for name, each in value.items() if int(name) < layers}
    if isinstance(value, dict):
        return {name: _cut(name, each, depths, layers) for name, each in value.items()}
    return value


def make_shallow(directory: Path, model: str, layers: int) -> Path:
    """Fill ``directory`` with the first ``layers`` layers of the model directory ``model``; everything that is neither
    weights nor hidden is linked.

    Raises:
        ModelError: ``model`` is no model directory, or cannot be reduced.
    """
    source = checked(model).absolute()
    if not source.is_dir():
        raise ModelError(f"--model {model}: a GGUF file cannot be reduced to fewer layers")
    document = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(shallow_config(document, layers), indent=1)
    for file in source.rglob("*"):
        name = file.relative_to(source)
        if any(part.startswith(".") for part in name.parts) or not file.is_file() or str(name) == "config.json":
            continue
        if file.suffix.lower() not in _WEIGHTS and file.stat().st_size <= _LARGEST_BYTES:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).symlink_to(file)
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory
