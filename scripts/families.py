#!/usr/bin/env python3
"""Traces every architecture that the installed engine registers, on a small configuration of each.

    families.py [--write] [--json] [ARCHITECTURE ...]

Prints the table of docs/families.md, or (--json) one object: architecture -> need in MiB and chunk in tokens, or what
stops it. --write puts the table into docs/families.md. Each is traced in a child that is forked after the imports.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
LAYERS = 4
GIB = 80
CAPABILITY = (12, 0)
TOKENS, DEEPSEEK_TOKENS = 65_536, 86_912
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
    "Glm5NextForCausalLM": "glm5_next_text",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3SparseForCausalLM": "minimax_m3_vl_text",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl",
}
_MXFP4_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
# By model type: what published checkpoints say and transformers' defaults leave out.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        },
    },
    "glm4_moe": {"head_dim": 128},
    "glm5_next_text": {"mhc": True, "mla_use_nope": True, "index_kpool_compress": True},
    "gpt_oss": {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _MXFP4_KEPT}},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    },
}  # fmt: skip
# A second configuration file, of DeepSeek's own. Without one the engine takes the same values for the rest.
DEEPSEEK = {"n_layers": LAYERS, "n_hash_layers": 1, "compress_ratios": [0, 0, 4, 128]}
WITHOUT_CONFIGURATION = "no configuration in transformers: the engine reads it from the weights' file"

Traced = dict[str, float] | str
HEAD = f"""# Architectures on the virtual GPU

Written by `scripts/families.py --write`; not to be edited. Every architecture that FreeToken {{engine}} registers, with
transformers {{transformers}} and torch {{torch}}: its first {LAYERS} layers, with the dimensions of transformers' own
configuration and what published checkpoints add to it (Flash-Next: the geometry of this package), on a virtual GPU
of {GIB} GiB with compute capability {CAPABILITY[0]}.{CAPABILITY[1]}:

    ft serve {" ".join(SERVE)} --num-tokens {TOKENS}

DeepSeek-V4's scheduler issues whole prompts, so its pool sets the chunk: `--num-tokens {DEEPSEEK_TOKENS}`. The need
is the largest transient of a full chunk, in the allocated ledger.

"""


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
    config = CONFIG_MAPPING[kind]().to_dict() | {"architectures": [architecture], "model_type": kind}
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part |= PUBLISHED.get(part.get("model_type", ""), {})
        shortened(part)
    return config


def make_family(directory: Path, config: dict[str, Any]) -> Path:
    """A model directory of ``config``, with a toy tokenizer and no weights."""
    from prefill_probe.geometry import make_model

    make_model(directory, "qwen36-35b-a3b-bf16", layers=LAYERS)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if config["model_type"] == "deepseek_v4":
        (directory / "inference").mkdir(exist_ok=True)
        (directory / "inference" / "config.json").write_text(json.dumps(DEEPSEEK), encoding="utf-8")
    return directory


def tokens_of(config: dict[str, Any]) -> int:
    """Tokens of the KV pool. DeepSeek-V4's scheduler issues whole prompts: there they set the chunk."""
    return DEEPSEEK_TOKENS if config["model_type"] == "deepseek_v4" else TOKENS


def traced(config: dict[str, Any], directory: Path) -> Traced:
    """``{"need": MiB, "chunk": tokens}``, or what stops it."""
    from engine_hooks.freetoken.virtual import estimate_serve
    from prefill_probe.settings import ProbeSettings
    from prefill_probe.virtual.cards import card_of

    serve = ["--model", str(make_family(directory, config)), *SERVE, "--num-tokens", str(tokens_of(config))]
    try:
        record = estimate_serve(serve, card_of(GIB << 30, CAPABILITY), ProbeSettings())
    except BaseException as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if record.need is None or record.fault is not None:
        return str(record.fault.text if record.fault else record.verdict)
    return {"need": round(record.need.allocated_bytes / (1 << 20), 1), "chunk": record.chunk.effective}


def forked(config: dict[str, Any], directory: Path) -> Traced:
    """``traced`` in a child process."""
    answer = directory.with_suffix(".json")
    child = os.fork()
    if child == 0:
        answer.write_text(json.dumps(traced(config, directory)), encoding="utf-8")
        os._exit(0)
    os.waitpid(child, 0)
    result: Traced = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else "no answer"
    return result


def found_in(directory: Path, architectures: list[str]) -> dict[str, Traced]:
    """By architecture (none: all that are registered): what ``traced`` says."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    logging.disable(logging.WARNING)
    # Imported once, before the forks.
    import freetoken.server.args  # noqa: F401
    from freetoken.models.register import _MODEL_REGISTRY

    found: dict[str, Traced] = {}
    for architecture in architectures or _MODEL_REGISTRY:
        config = document(architecture)
        found[architecture] = WITHOUT_CONFIGURATION if config is None else forked(config, directory / architecture)
    return found


def page_of(found: dict[str, Traced]) -> str:
    """The text of docs/families.md."""
    width = max(map(len, found)) + 2
    names = {name: f"{f'`{name}`':{width}}" for name in sorted(found)}
    traced = {name: each for name, each in found.items() if not isinstance(each, str)}
    return HEAD.format(
        engine=version("freetoken"), transformers=version("transformers"), torch=version("torch").partition("+")[0]
    ) + "\n".join(
        [
            f"| {'architecture':{width}} | chunk, tokens | need, MiB |",
            f"|{'-' * (width + 2)}|--------------:|----------:|",
            *(
                f"| {names[name]} | {traced[name]['chunk']:13} | {traced[name]['need']:9.1f} |"
                for name in names
                if name in traced
            ),
            "",
            "These do not trace:",
            "",
            f"| {'architecture':{width}} | stopped by |",
            f"|{'-' * (width + 2)}|---|",
            *(f"| {names[name]} | {found[name]} |" for name in names if name not in traced),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write and given.architectures:
        parser.error("--write is for all architectures; name none")
    with tempfile.TemporaryDirectory() as directory:
        found = found_in(Path(directory), given.architectures)
    page = page_of(found)
    print(json.dumps(found) if given.json else page, end="\n" if given.json else "")
    if given.write:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
