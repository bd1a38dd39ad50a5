"""A model directory as an estimate needs it: a ``config.json`` that says everything; weights are never read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prefill_probe.virtual.errors import ModelError

# A value that is missing would be filled in by a default, and the estimate would be of another model.
_REQUIRED = ("hidden_size", "num_hidden_layers", "vocab_size")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def looks_like_hub_id(text: str) -> bool:
    """Whether ``text`` can be the name of a model on a hub; a path that exists is none."""
    return _HUB_ID.fullmatch(text) is not None and not Path(text).exists()


def checked(text: str) -> Path:
    """The model directory (or GGUF file) named by ``text``.

    Raises:
        ModelError: it is not there, or its ``config.json`` is not one; one line, with the key that is missing.
    """
    path = Path(text).expanduser()
    if not path.exists():
        if looks_like_hub_id(text):
            raise ModelError(f"--model {text} looks like a hub id, and no network is used: give a directory")
        raise ModelError(f"--model {text}: no such directory")
    if path.suffix == ".gguf":
        return path
    if not path.is_dir():
        raise ModelError(f"--model {text} is not a directory")
    file = path / "config.json"
    if not file.exists():
        raise ModelError(f"--model {text}: it has no config.json")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from None
    _check_keys(file, document)
    return path


def _check_keys(file: Path, document: Any) -> None:
    if not isinstance(document, dict):
        raise ModelError(f"{file} is not a JSON object")
    architectures = document.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(f'{file}: the key "architectures" is missing')
    text = document.get("text_config", document)
    if not isinstance(text, dict):
        raise ModelError(f'{file}: "text_config" is not a JSON object')
    for key in _REQUIRED:
        if key not in text and key not in document:
            raise ModelError(f'{file}: the key "{key}" is missing')
        value = text.get(key, document.get(key))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f'{file}: "{key}" is {value!r}, not a positive whole number')
