"""The geometry of a model, as the reference engine builds it, from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefill_probe import geometry
from prefill_probe.virtual.errors import ModelError
from prefill_probe.virtual.model_directory import checked

# What is built where no model is named.
DEFAULT_GEOMETRY = "flash-next-nvfp4"
KNOWN = (
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
)
GDN, ATTENTION = "linear_attention", "full_attention"
# SDPA's flash kernel and the chunked delta rule take none that is larger, the decode kernel powers of two.
_HEAD_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class ModelConfig:
    """What the reference engine builds of a model; sizes are numbers of elements.

    Attributes:
        path: its directory, or the name of a geometry that ships with the package.
        kinds: by layer, ``GDN`` or ``ATTENTION``.
        longest: tokens of the longest sequence.
        rotary_dim: of ``head_dim``, rotated by position.
        conv_width: tokens that the short convolution of a GDN layer sees.
        gate: activation of a GDN layer's output gate.
        expert_size, shared_size: inner width of a routed expert, and of the one that every token passes.
    """

    path: str
    architecture: str
    kinds: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    longest: int
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rotary_base: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate: str
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int

    @property
    def conv_size(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def count(self, kind: str) -> int:
        """Layers of one kind."""
        return self.kinds.count(kind)


def load_config(model: str | None, *, layers: int) -> ModelConfig:
    """The first ``layers`` layers of ``model``: a directory with a ``config.json``, or None for ``DEFAULT_GEOMETRY``.

    Raises:
        ModelError: no such directory, a ``config.json`` that is malformed or lacks a key, an architecture that is not
            among ``KNOWN``, or fewer than one layer; one line.
    """
    if layers < 1:
        raise ModelError(f"--layers {layers}: a model has at least one layer")
    if model is None:
        return _parsed(DEFAULT_GEOMETRY, DEFAULT_GEOMETRY, geometry.config(DEFAULT_GEOMETRY), layers)
    path = checked(model)
    if not path.is_dir():
        raise ModelError(f"--model {model}: the reference engine reads a directory with a config.json")
    file = path / "config.json"
    return _parsed(str(path), str(file), json.loads(Path(file).read_text(encoding="utf-8")), layers)


@dataclass(frozen=True)
class _Reader:
    """Values of a ``config.json``, by key: the text model's own first, then the document's."""

    file: str
    documents: tuple[dict[str, Any], ...]

    def find(self, key: str) -> Any:
        return next((each[key] for each in self.documents if each.get(key) is not None), None)

    def count(self, key: str, least: int = 1) -> int:
        value = self.find(key)
        if value is None:
            raise ModelError(f'{self.file}: the key "{key}" is missing')
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(f'{self.file}: "{key}" is {value!r}, not a whole number of at least {least}')
        return value

    def number(self, key: str, default: float) -> float:
        value = self.find(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ModelError(f'{self.file}: "{key}" is {value!r}, not a number above 0')
        return float(value)


def _parsed(path: str, file: str, document: dict[str, Any], layers: int) -> ModelConfig:
    architecture = document["architectures"][0]
    if architecture not in KNOWN:
        raise ModelError(f"{file}: the reference engine does not know {architecture}; it knows {', '.join(KNOWN)}")
    text = document.get("text_config", document)
    rope = text.get("rope_parameters")
    read = _Reader(file, (text, document, rope if isinstance(rope, dict) else {}))
    head_dim = read.count("head_dim")
    config = ModelConfig(
        path=path,
        architecture=architecture,
        kinds=_kinds(read)[:layers],
        hidden_size=read.count("hidden_size"),
        vocab_size=read.count("vocab_size"),
        longest=read.count("max_position_embeddings", 2),
        eps=read.number("rms_norm_eps", 1e-6),
        heads=read.count("num_attention_heads"),
        kv_heads=read.count("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * read.number("partial_rotary_factor", 1.0)) // 2 * 2,
        rotary_base=read.number("rope_theta", 10_000.0),
        key_heads=read.count("linear_num_key_heads"),
        value_heads=read.count("linear_num_value_heads"),
        key_dim=read.count("linear_key_head_dim"),
        value_dim=read.count("linear_value_head_dim"),
        conv_width=read.count("linear_conv_kernel_dim", 2),
        gate=str(read.find("output_gate_type") or "silu"),
        experts=read.count("num_experts"),
        experts_per_token=read.count("num_experts_per_tok"),
        expert_size=read.count("moe_intermediate_size"),
        shared_size=read.count("shared_expert_intermediate_size"),
    )
    for fault in _faults(config):
        raise ModelError(f"{file}: {fault}")
    return config


def _kinds(read: _Reader) -> tuple[str, ...]:
    """The layers, as they are listed, or every n-th with attention."""
    listed = read.find("layer_types")
    if listed is None:
        interval = read.count("full_attention_interval")
        total = read.count("num_hidden_layers")
        return tuple(ATTENTION if number % interval == 0 else GDN for number in range(1, total + 1))
    if not isinstance(listed, list) or not listed or any(kind not in (GDN, ATTENTION) for kind in listed):
        raise ModelError(f'{read.file}: "layer_types" is not a list of {GDN} and {ATTENTION}')
    return tuple(listed)


def _faults(config: ModelConfig) -> list[str]:
    """What the kernels do not take."""
    found = []
    for name, many, few in (
        ("attention heads", config.heads, config.kv_heads),
        ("GDN value heads", config.value_heads, config.key_heads),
    ):
        if many % few:
            found.append(f"{many} {name} are not a multiple of {few}")
    for name, size in (("head_dim", config.head_dim), ("linear_key_head_dim", config.key_dim)):
        if size not in _HEAD_SIZES:
            found.append(f'"{name}" is {size}; the kernels take {", ".join(map(str, _HEAD_SIZES))}')
    if config.experts_per_token > config.experts:
        found.append(f"{config.experts_per_token} experts a token are more than {config.experts}")
    if config.gate not in ("silu", "sigmoid"):
        found.append(f'"output_gate_type" is {config.gate!r}, not silu or sigmoid')
    return found
