"""Sizes: "128MiB" to bytes and back. The only place that knows units.

Bytes everywhere inside the package; MiB and GiB only in text that a person reads or types.
"""

from __future__ import annotations

import re

MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "b": 1,
    "kib": 1 << 10,
    "k": 1 << 10,
    "kb": 10**3,
    "mib": MIB,
    "m": MIB,
    "mb": 10**6,
    "gib": GIB,
    "g": GIB,
    "gb": 10**9,
    "tib": 1 << 40,
    "t": 1 << 40,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``128MiB``, ``1.5 GiB`` or ``0B``.

    Args:
        text: a number with a unit. KiB, MiB, GiB, TiB (also K, M, G, T) are powers of 1024; KB, MB, GB, TB of 1000.

    Raises:
        ValueError: no number, a negative number, no unit or an unknown unit. The message says what is accepted.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write a number with a unit, such as 128MiB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def mib(size: int) -> str:
    """``size`` bytes as whole MiB, ``"1682 MiB"``."""
    return f"{size / MIB:.0f} MiB"


def shown(size: int) -> str:
    """``size`` bytes in the unit that suits it: GiB from one on, MiB below."""
    return gib(size) if abs(size) >= GIB else mib(size)


def gib(size: int) -> str:
    """``size`` bytes as GiB with two decimals, ``"1.64 GiB"``."""
    return f"{size / GIB:.2f} GiB"
