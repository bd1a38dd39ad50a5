"""Words of a unit's command line: quoting as in systemd.syntax(7), which is not a shell's."""

from __future__ import annotations

import re

_SPACE = " \t\n\r"
_PLAIN = re.compile(r"[\w@%+=:,./$-]+", re.ASCII)
_CONTROL = {"\a": r"\a", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v"}
_SIMPLE = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, '"': 34, "'": 39, "s": 32}
_ESCAPE = re.compile(
    rb"""\\(?:([abfnrtv\\"'s])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2}))"""
)
_VARIABLE = re.compile(r"\$\$|\$\{([^}]*)\}")


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


def split_words(text: str, *, variable: bool = False) -> list[str]:
    """The words of a value: quotes taken off, escapes resolved; an unknown escape stays as it is written.

    Args:
        text: the value of a setting; or of a variable, where a backslash only takes the next letter as it is, and a
            quote need not be closed.
        variable: whether it is a variable's.

    Raises:
        ValueError: a quote is not closed.
    """
    data = text.encode("utf-8", "surrogateescape")
    words: list[str] = []
    space = _SPACE.encode()
    at = 0
    while True:
        while at < len(data) and data[at] in space:
            at += 1
        if at == len(data):
            return words
        word, quote = bytearray(), 0
        while at < len(data) and (quote or data[at] not in space):
            letter = data[at]
            if letter == ord("\\"):
                value, at = (data[at + 1 : at + 2], at + 2) if variable else _escape(data, at)
                word += value
                continue
            if quote and letter == quote:
                quote = 0
            elif not quote and letter in b"\"'":
                quote = letter
            else:
                word.append(letter)
            at += 1
        if quote and not variable:
            raise ValueError(f"the quote {chr(quote)} is not closed")
        words.append(word.decode("utf-8", "surrogateescape"))


def _escape(data: bytes, at: int) -> tuple[bytes, int]:
    """What the backslash at ``at`` stands for, and where the text goes on."""
    match = _ESCAPE.match(data, at)
    if match is None:
        return data[at : at + 2], at + 2
    simple, byte, short, long, octal = match.groups()
    if simple:
        value = bytes([_SIMPLE[simple.decode()]])
    elif byte or octal:
        value = bytes([int(byte, 16) if byte else int(octal, 8)])
    else:
        code = int(short or long, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            return data[at : at + 2], at + 2
        value = chr(code).encode()
    return (data[at : at + 2], at + 2) if value == b"\0" else (value, match.end())


def expand_variables(words: list[str], environment: dict[str, str]) -> list[str]:
    """``words`` as systemd starts them: ``$NAME`` is a word that becomes any number of words, ``${NAME}`` is replaced
    where it stands, ``$$`` is a dollar sign, and what is not set is empty."""
    expanded: list[str] = []
    for word in words:
        if word.startswith("$") and word[1:2] not in ("{", "$"):
            expanded += split_words(environment.get(word[1:], ""), variable=True)
        else:
            expanded.append(_VARIABLE.sub(lambda found: environment.get(found[1], "") if found[1] else "$", word))
    return expanded


def variables_in(words: list[str]) -> set[str]:
    """The names that ``expand_variables`` looks up."""
    braced = {name for word in words for name in _VARIABLE.findall(word) if name}
    return braced | {word[1:] for word in words if word.startswith("$") and word[1:2] not in ("{", "$")}
