"""Traces every architecture that the installed engine registers, on the defaults of its Hugging Face configuration.

    python families.py DIRECTORY

Prints one JSON object: architecture -> peak of the full chunk over idle (MiB, allocated), or why there is none.
Each is traced in a child that is forked after the imports.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

LAYERS = 4
SERVE = ["--text-model-only", "--max-running-requests", "2", "--cuda-graph-max-bs", "2"]
# Model types that differ from what the registry's name says.
TYPES = {
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "MiniMaxM2ForCausalLM": "minimax_m2",
}


def model_type(architecture: str) -> str:
    """``GlmMoeDsaForCausalLM`` -> ``glm_moe_dsa``."""
    if architecture in TYPES:
        return TYPES[architecture]
    stem = architecture.split("For")[0]
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in stem).lstrip("_")


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """The same with four layers."""
    if "num_hidden_layers" in config:
        config["num_hidden_layers"] = LAYERS
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(config.get(name), list):
                config[name] = config[name][:LAYERS]
    config.pop("per_layer_config", None)  # Gemma: by numbers of layers that are gone
    return config


def document(architecture: str) -> dict[str, Any] | None:
    """A ``config.json``; None where transformers knows no configuration of that name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from prefill_probe import geometry

    if architecture == "Qwen4ExpForConditionalGeneration":
        return geometry.config("flash-next-nvfp4", layers=LAYERS)
    kind = model_type(architecture)
    if kind not in CONFIG_MAPPING:
        return None
    config = shortened(CONFIG_MAPPING[kind]().to_dict())
    for value in config.values():
        if isinstance(value, dict):
            shortened(value)
    config |= {"architectures": [architecture], "model_type": kind}
    if kind == "gpt_oss":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return config


def traced(architecture: str, config: dict[str, Any], directory: Path) -> float | str:
    """The peak over idle of the full chunk, in MiB, or why there is none."""
    from engine_hooks.freetoken.virtual import estimate_serve
    from prefill_probe.geometry import make_model
    from prefill_probe.settings import ProbeSettings
    from prefill_probe.virtual.cards import card_of

    make_model(directory, "qwen36-35b-a3b-bf16", layers=LAYERS)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        card = card_of(80 << 30, (12, 0))
        record = estimate_serve(["--model", str(directory), *SERVE], card, ProbeSettings())
    except BaseException as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if record.need is None or record.fault is not None:
        return str(record.fault.text if record.fault else record.verdict)
    return round(record.need.allocated_bytes / (1 << 20), 1)


def forked(architecture: str, config: dict[str, Any], directory: Path) -> float | str:
    """``traced`` in a child process."""
    answer = directory.with_suffix(".json")
    child = os.fork()
    if child == 0:
        answer.write_text(json.dumps(traced(architecture, config, directory)), encoding="utf-8")
        os._exit(0)
    os.waitpid(child, 0)
    result: float | str = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else "no answer"
    return result


def main(directory: Path) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    logging.disable(logging.WARNING)
    # Imported once, before the forks.
    import freetoken.server.args  # noqa: F401
    from freetoken.models.register import _MODEL_REGISTRY

    found: dict[str, float | str] = {}
    for architecture in _MODEL_REGISTRY:
        config = document(architecture)
        if config is None:
            found[architecture] = "no configuration in transformers"
        else:
            found[architecture] = forked(architecture, config, directory / architecture)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
