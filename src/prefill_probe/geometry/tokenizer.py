"""A toy tokenizer: a space and three small letters are one token; of anything else each byte is one.

It is a byte-level BPE, for that is what transformers makes of the tokenizer of these models (5.18: ``qwen4_exp``),
whatever the directory says.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

END = "<|endoftext|>"
WORDS = 26**3
# How byte-level BPE writes bytes: those that print stand for themselves, the others for characters from U+0100 on.
_PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTING]
_BYTES = [chr(byte) for byte in _PRINTING] + [chr(0x100 + number) for number in range(len(_OTHERS))]
_SPACE = chr(0x100 + _OTHERS.index(ord(" ")))


def words(numbers: Iterable[int]) -> str:
    """A text of one token a number, each from 0 to ``WORDS`` - 1."""
    a = string.ascii_lowercase
    return "".join(f" {a[number // 676]}{a[number // 26 % 26]}{a[number % 26]}" for number in numbers)


def document() -> dict[str, Any]:
    """The content of ``tokenizer.json``."""
    longer, level = [], [_SPACE]
    for _ in range(3):
        level = [word + letter for word in level for letter in string.ascii_lowercase]
        longer += level
    special = {"id": 0, "content": END, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate([END, *_BYTES, *longer])},
            "merges": [[word[:-1], word[-1]] for word in longer],
        },
    }
