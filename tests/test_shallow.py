from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefill_probe.geometry import config
from prefill_probe.shallow import make_shallow, shallow_config
from prefill_probe.virtual.errors import ModelError


@pytest.mark.parametrize("name", ["flash-next-nvfp4", "qwen36-35b-a3b-nvfp4"])
def test_a_geometry_is_cut_to_what_it_is_with_fewer_layers(name: str) -> None:
    assert shallow_config(config(name), 4) == config(name, layers=4)


DEEP = {"architectures": ["A"], "num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 99}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # By layer: a list, a list within an object, numbers of layers, an object by number.
        ({"mlp_layer_types": list("ddssssss")}, {"mlp_layer_types": list("dds")}),
        ({"sparse": {"freq": [0, 0, 1, 1, 1, 1, 1, 1]}}, {"sparse": {"freq": [0, 0, 1]}}),
        ({"ple_layer_ids": [2, 7]}, {"ple_layer_ids": [2]}),
        ({"per_layer": {"0": 1, "2": 5, "7": 3}}, {"per_layer": {"0": 1, "2": 5}}),
        # One entry more for each layer that predicts a further token.
        ({"ratios": [4] * 9, "num_nextn_predict_layers": 1}, {"ratios": [4] * 3, "num_nextn_predict_layers": 1}),
        # Not by layer, though as long as the model is deep.
        ({"rope_scaling": {"long_factor": [1.0] * 8}}, {"rope_scaling": {"long_factor": [1.0] * 8}}),
        ({"eos_token_id": [1, 2], "first_k_dense_replace": 1}, {"eos_token_id": [1, 2], "first_k_dense_replace": 1}),
    ],
)
def test_what_is_said_by_layer_is_cut_and_nothing_else(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert shallow_config(DEEP | given, 3) == DEEP | wanted | {"num_hidden_layers": 3}


@pytest.mark.parametrize("path", [("text_config",), ("thinker_config", "text_config")])
def test_the_language_model_is_cut_wherever_it_is_and_towers_are_not(path: tuple[str, ...]) -> None:
    tower = {"num_hidden_layers": 8, "layer_types": ["v"] * 8}

    def around(text: dict[str, Any]) -> dict[str, Any]:
        for name in reversed(path):
            text = {name: text, "vision_config": tower, "audio_config": tower}
        return text

    assert shallow_config(around(DEEP), 3) == around(DEEP | {"num_hidden_layers": 3})


def test_a_depth_that_is_said_nowhere_cannot_be_reduced() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        shallow_config({"n_layer": 12}, 3)


def test_everything_but_weights_is_linked(tmp_path: Path) -> None:
    model, made = tmp_path / "model", tmp_path / "made"
    (model / "extra").mkdir(parents=True)
    (model / ".cache").mkdir()
    made.mkdir()
    (model / "config.json").write_text(json.dumps(DEEP))
    for name in ("tokenizer.json", "model-00001-of-00002.safetensors", "extra/merges.txt", ".cache/lock"):
        (model / name).write_text("x")
    with (model / "unnamed").open("wb") as file:
        file.truncate(300 << 20)
    make_shallow(made, str(model), 3)
    assert {str(file.relative_to(made)) for file in made.rglob("*") if file.is_file()} == {
        "config.json", "tokenizer.json", "extra/merges.txt",
    }  # fmt: skip
    assert json.loads((made / "config.json").read_text())["num_hidden_layers"] == 3
    assert json.loads((model / "config.json").read_text()) == DEEP


def test_a_gguf_file_cannot_be_reduced(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("GGUF")
    with pytest.raises(ModelError, match="GGUF"):
        make_shallow(tmp_path, str(tmp_path / "model.gguf"), 3)
