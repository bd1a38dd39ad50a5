from __future__ import annotations

from pathlib import Path

import pytest

from prefill_probe.geometry import NAMES, make_model
from prefill_probe.geometry.tokenizer import WORDS, words

PROMPT = [0, 1, 25, 26, 676, 12345, WORDS - 1] * 300


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_n_words_is_a_prompt_of_n_tokens(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_model(tmp_path, name, layers=4))
    ids = tokenizer.encode(words(PROMPT))
    assert len(ids) == len(PROMPT)
    assert len(set(ids)) == 7
    for text in (words(PROMPT), "Grüße,\n\t日本 <tag> 100 %\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_so_it_is_when_the_class_of_the_model_type_wins_over_the_directory(tmp_path: Path) -> None:
    """transformers 5.18 takes its own class for qwen4_exp; a word-level tokenizer became an empty prompt there."""
    module = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    tokenizer = module.Qwen3_5Tokenizer.from_pretrained(make_model(tmp_path, NAMES[0], layers=4))
    assert len(tokenizer.encode(words(PROMPT))) == len(PROMPT)
