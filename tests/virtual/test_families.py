from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from warm import document

pytestmark = pytest.mark.engine

SWEEP = Path(__file__).resolve().parents[2] / "scripts" / "families.py"
PAGE = SWEEP.parents[1] / "docs" / "families.md"
# What stops an architecture, where something does; each is the configuration at hand, not an operator.
STOPPED = {
    # Its configuration is nested in transformers, and flat in what the engine reads.
    "Mistral3ForConditionalGeneration": "has no attribute 'num_attention_heads'",
    # The engine reads its configuration from a GGUF file.
    "Gemma4GGUFForCausalLM": "no configuration in transformers",
}
# Their defaults lack what the engine reads, at any depth: DeepSeek has a second file, of one depth.
UNREAD = ("Mistral3ForConditionalGeneration", "DeepseekV4ForCausalLM")
MUST_TRACE = (
    "Qwen4ExpForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
)


def found_by(program: Path, *arguments: str) -> dict[str, Any]:
    """What a program prints of each architecture."""
    pytest.importorskip("freetoken")
    return document(program, *arguments)


def test_compressed_weights_whose_size_is_not_in_the_configuration_are_traced() -> None:
    assert found_by(SWEEP, "--json", "Glm4MoeForCausalLM") == {
        "Glm4MoeForCausalLM": {"need": pytest.approx(945.2, rel=0.01), "chunk": 8192}
    }


def test_dummies_of_compressed_weights_have_the_size_that_the_engine_packs_weights_to() -> None:
    pytest.importorskip("freetoken")
    torch = pytest.importorskip("torch")
    from freetoken.models.glm4_moe import df11_embedding, df11_linear

    from engine_hooks.freetoken import compressed

    config = SimpleNamespace(model_config=SimpleNamespace(architectures=["Glm4MoeForCausalLM"]))
    weight = (torch.randn(512, 384, generator=torch.Generator().manual_seed(5)) * 0.02).to(torch.bfloat16)
    with compressed.answered(config):
        linear = df11_linear.LinearDF11(384, 512, has_bias=False)
        embedding = df11_embedding.EmbeddingDF11(512, 384)
    for layer, packed in (
        (linear, df11_linear.compress_df11_weight(weight)),
        (embedding, df11_embedding.compress_df11_embedding(weight)),
    ):
        for name, tensor in packed.items():
            dummy = getattr(layer, name)
            assert dummy.dtype == tensor.dtype
            assert dummy.numel() == pytest.approx(tensor.numel(), rel=0.01 if name == "bitstream" else 0)
    assert df11_linear.LinearDF11(384, 512, has_bias=False).low8.numel() == 0


def test_the_page_has_every_architecture_and_a_need_for_those_that_must_trace() -> None:
    pytest.importorskip("freetoken")
    from freetoken.models.register import _MODEL_REGISTRY

    rows = dict(re.findall(r"^\| `(\w+)` +\|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(rows) == set(_MODEL_REGISTRY)
    for name in MUST_TRACE:
        assert float(rows[name].split("|")[-1]) > 0


@pytest.mark.slow
def test_every_registered_architecture_traces_or_is_known_not_to() -> None:
    found = found_by(SWEEP, "--json")
    stopped = {name: text for name, text in found.items() if isinstance(text, str)}
    assert {name for name, text in stopped.items() if STOPPED.get(name, "traced") not in text} == set(), stopped
    assert set(MUST_TRACE) <= set(found) - set(stopped)
    assert found["Qwen3_5MoeForConditionalGeneration"]["need"] == pytest.approx(996.3, rel=0.01)


@pytest.mark.slow
def test_every_architecture_that_is_read_is_read_with_its_first_layers_as_they_are(tmp_path: Path) -> None:
    found = found_by(Path(__file__).with_name("shallow_families.py"), str(tmp_path))
    read = {name: text for name, text in found.items() if not text.startswith("full not read")}
    assert set(found) - set(read) <= set(UNREAD), found
    assert set(read.values()) == {"as the first 6"}, found
    assert len(read) >= 24
