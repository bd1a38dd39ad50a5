"""Words of a unit's command line: quoting as in systemd.syntax(7), which is not a shell's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

Backslash = Literal["escape", "only escape", "letter"]

_SPACE = b" \t\n\r"
_PLAIN = re.compile(r"[\w@%+=:,./$-]+", re.ASCII)
_CONTROL = {"\a": r"\a", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v"}
_SIMPLE = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, '"': 34, "'": 39, "s": 32}
_ESCAPE = re.compile(
    rb"""\\(?:([abfnrtv\\"'s])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2}))"""
)
# A dollar sign, a variable, or a brace that is not closed: the rest stays as it is.
_VARIABLE = re.compile(r"\$\$|\$\{([^}]*)\}|\$\{.*", re.DOTALL)


def quote_word(word: str) -> str:
    """``word`` as systemd reads it back from ``ExecStart=``: no specifier, no variable, one argument.

    Raises:
        ValueError: it holds a NUL or half a surrogate pair, which no argument can.
    """
    if "\0" in word or not _encodable(word):
        raise ValueError(f"{word!r} cannot be written in a unit: it is not text")
    text = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + "".join(_quoted(letter) for letter in text) + '"'


def _quoted(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    if letter in _CONTROL:
        return _CONTROL[letter]
    code = ord(letter)
    # Noncharacters are no valid text to systemd, which drops the line; as bytes they pass.
    if code < 32 or code == 127 or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF:
        return "".join(f"\\x{byte:02x}" for byte in letter.encode())
    return letter


def _encodable(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def split_words(text: str, backslash: Backslash = "escape") -> list[str]:
    """The words of a value, without their quotes.

    Args:
        text: the value.
        backslash: what a backslash does. ``escape``, in a command: stands for a letter, or else for itself.
            ``only escape``, in ``Environment=``: no unknown escape is taken. ``letter``, in the value of a variable:
            the next letter stands for itself, and a quote need not be closed.

    Raises:
        ValueError: a quote that is not closed, or an unknown escape.
    """
    return [word for _, word in _scan(text, backslash)]


def split_command(text: str) -> list[str]:
    """The words of a command. A ``;`` by itself would begin another one; ``\\;`` is a word.

    Raises:
        ValueError: a second command, or a quote that is not closed.
    """
    found = list(_scan(text, "escape"))
    if ";" in (written for written, _ in found):
        raise ValueError("a second command after ;")
    return [";" if written == r"\;" else word for written, word in found]


def _scan(text: str, backslash: Backslash) -> Iterator[tuple[str, str]]:
    """Each word as it is written, and as it is read."""
    data = text.encode("utf-8", "surrogateescape")
    at = 0
    while True:
        while at < len(data) and data[at] in _SPACE:
            at += 1
        if at == len(data):
            return
        word, quote, start = bytearray(), 0, at
        while at < len(data) and (quote or data[at] not in _SPACE):
            letter = data[at]
            if letter == ord("\\"):
                value, at = (data[at + 1 : at + 2], at + 2) if backslash == "letter" else _escape(data, at, backslash)
                word += value
                continue
            if quote and letter == quote:
                quote = 0
            elif not quote and letter in b"\"'":
                quote = letter
            else:
                word.append(letter)
            at += 1
        if quote and backslash != "letter":
            raise ValueError(f"the quote {chr(quote)} is not closed")
        yield data[start:at].decode("utf-8", "surrogateescape"), word.decode("utf-8", "surrogateescape")


def _escape(data: bytes, at: int, backslash: Backslash) -> tuple[bytes, int]:
    """What the backslash at ``at`` stands for, and where the text goes on."""
    if match := _ESCAPE.match(data, at):
        simple, byte, short, long, octal = match.groups()
        code = _SIMPLE[simple.decode()] if simple else int(octal, 8) if octal else int(byte or short or long, 16)
        if simple or byte or octal:
            value = bytes([code])
        else:
            value = b"" if code > 0x10FFFF or 0xD800 <= code < 0xE000 else chr(code).encode()
        if value not in (b"", b"\0"):
            return value, match.end()
    unknown = data[at : at + 2]
    if backslash == "only escape":
        raise ValueError(f"{unknown.decode('utf-8', 'replace')} is no escape; write \\\\ for a backslash")
    return unknown, at + 2


def expand_variables(words: list[str], environment: dict[str, str]) -> list[str]:
    """``words`` as systemd starts them: ``$NAME`` is a word that becomes any number of words, ``${NAME}`` is replaced
    where it stands, ``$$`` is a dollar sign, and what is not set is empty."""

    def replaced(found: re.Match[str]) -> str:
        if found[1] is not None:
            return environment.get(found[1], "")
        return "$" if found[0] == "$$" else found[0]

    expanded: list[str] = []
    for word in words:
        if word.startswith("$") and word[1:2] not in ("{", "$"):
            expanded += split_words(environment.get(word[1:], ""), "letter")
        else:
            expanded.append(_VARIABLE.sub(replaced, word))
    return expanded


def variables_in(words: list[str]) -> set[str]:
    """The names that ``expand_variables`` looks up."""
    braced = {name for word in words for name in _VARIABLE.findall(word) if name}
    return braced | {word[1:] for word in words if word.startswith("$") and word[1:2] not in ("{", "$")}
