from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefill_probe import geometry
from prefill_probe.reference.config import ATTENTION, GDN, KNOWN, load_config
from prefill_probe.virtual.errors import ModelError

# What Qwen3-Next says of itself: no text_config, no list of layers, rope at the top.
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
}  # fmt: skip


def written(directory: Path, document: Any) -> str:
    text = document if isinstance(document, str) else json.dumps(document)
    (directory / "config.json").write_text(text, encoding="utf-8")
    return str(directory)


def refused(model: str, layers: int = 4) -> str:
    with pytest.raises(ModelError) as refusal:
        load_config(model, layers=layers)
    assert len(str(refusal.value).splitlines()) == 1
    return str(refusal.value)


def test_the_geometry_that_ships_is_flash_next() -> None:
    config = load_config(None, layers=4)
    assert config.architecture == "Qwen4ExpForConditionalGeneration"
    assert config.kinds == (GDN, GDN, GDN, ATTENTION)
    assert (config.hidden_size, config.experts, config.experts_per_token, config.expert_size) == (2560, 512, 10, 640)
    assert (config.heads, config.kv_heads, config.head_dim, config.rotary_dim) == (24, 2, 256, 64)
    # Queries and keys of 16 heads, values of 48, all of 128.
    assert config.conv_size == (16 + 16 + 48) * 128


def test_qwen3_5_moe_is_read(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, geometry.config("qwen36-35b-a3b-bf16")), layers=8)
    assert (config.count(GDN), config.count(ATTENTION)) == (6, 2)
    assert (config.rotary_base, config.gate) == (10_000_000.0, "silu")


def test_qwen3_next_is_read(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, QWEN3_NEXT), layers=5)
    assert config.kinds == (GDN, GDN, GDN, ATTENTION, GDN)
    assert (config.rotary_dim, config.rotary_base) == (64, 10_000_000.0)


def test_more_layers_than_the_model_has_are_the_model(tmp_path: Path) -> None:
    assert len(load_config(written(tmp_path, QWEN3_NEXT), layers=100).kinds) == 48


def test_fewer_than_one_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="--layers 0: a model has at least one layer"):
        load_config(None, layers=0)


def test_a_directory_that_is_not_there_is_named() -> None:
    assert "no/such/model" in refused("no/such/model")


def test_what_is_no_json_is_named(tmp_path: Path) -> None:
    assert "is not JSON" in refused(written(tmp_path, '{"architectures": ['))


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    said = refused(written(tmp_path, QWEN3_NEXT | {"architectures": ["LlamaForCausalLM"]}))
    assert "LlamaForCausalLM" in said
    assert all(known in said for known in KNOWN)


@pytest.mark.parametrize(
    "key", sorted(set(QWEN3_NEXT) - {"model_type", "rms_norm_eps", "rope_theta", "partial_rotary_factor"})
)
def test_a_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    document = {name: value for name, value in QWEN3_NEXT.items() if name != key}
    assert f'"{key}"' in refused(written(tmp_path, document))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 0),
        ("num_experts", "many"),
        ("num_experts_per_tok", 513),
        ("head_dim", 96),
        ("linear_key_head_dim", 512),
        ("num_key_value_heads", 3),
        ("linear_num_value_heads", 24),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", []),
        ("output_gate_type", "tanh"),
        ("rope_theta", -1),
    ],
)
def test_a_value_that_cannot_be_built_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    said = refused(written(tmp_path, QWEN3_NEXT | {key: value}))
    assert "config.json" in said
