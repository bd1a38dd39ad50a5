"""An ``EnvironmentFile=``: its quoting is neither a shell's nor that of a unit (systemd.exec(5))."""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPACE = " \t\r"


def parse_environment(text: str) -> dict[str, str]:
    """The variables of ``text``; a line that sets none is skipped, as systemd does.

    A comment ends with its line, also after a backslash, as since systemd 254.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        if text[at] in _SPACE + "\n":
            at += 1
        elif text[at] in "#;":
            at = _line_end(text, at)
        else:
            equals, end = text.find("=", at), _line_end(text, at)
            if equals == -1 or equals > end:
                at = end
                continue
            name = text[at:equals].rstrip(_SPACE)
            value, at = _value(text, equals + 1)
            if NAME.fullmatch(name):
                found[name] = value
    return found


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end == -1 else end


def _value(text: str, at: int) -> tuple[str, int]:
    """The value that begins at ``at``, and where its line ends."""
    value, kept = "", 0  # kept: how much of it must not be stripped
    quote, plain = "", False  # plain: inside an unquoted part, where quotes are letters
    while at < len(text) and (quote or text[at] != "\n"):
        letter, following = text[at], text[at + 1 : at + 2]
        at += 1
        if quote == "'" and letter != "'":
            value += letter
        elif quote == '"' and letter == "\\":
            value += "" if following == "\n" else following if following in tuple('"\\`$') else "\\" + following
            at += 1
        elif letter == quote:
            quote, kept, plain = "", len(value), False
        elif quote:
            value += letter
        elif letter == "\\":
            value += "" if following == "\n" else following
            at += 1
            kept, plain = len(value), True
        elif not plain and letter in "\"'":
            quote = letter
        elif plain or letter not in _SPACE:
            plain = True
            value += letter
            kept = kept if letter in _SPACE else len(value)
    return value[:kept] if not quote else value, at
