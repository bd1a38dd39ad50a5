"""GPUs by name: what the driver says of them.

``total_bytes`` is what CUDA reports, which is less than what is printed on the box and than nvidia-smi's total: the
driver keeps a part. Only the H200's total was measured (docs/evidence). The other totals and the multiprocessor counts
were not checked against a card or a document: where it is close, give the size of the card at hand (``--vram``).
"""

from __future__ import annotations

import difflib

from prefill_probe.sizes import GIB
from prefill_probe.virtual.device import Card

# Name, GiB, compute capability, streaming multiprocessors.
_CARDS = (
    ("RTX 3090", 23.69, (8, 6), 82),
    ("RTX 4080", 15.70, (8, 9), 76),
    ("RTX 4090", 23.64, (8, 9), 128),
    ("RTX 5070 Ti", 15.47, (12, 0), 70),
    ("RTX 5080", 15.47, (12, 0), 84),
    ("RTX 5090", 31.36, (12, 0), 170),
    ("L4", 22.03, (8, 9), 58),
    ("L40S", 44.39, (8, 9), 142),
    ("A100 40GB", 39.39, (8, 0), 108),
    ("A100 80GB", 79.15, (8, 0), 108),
    ("H100 80GB", 79.10, (9, 0), 132),
    ("H200", 139.80, (9, 0), 132),
)
# Shared memory of a block, opt-in, in bytes (CUDA programming guide, technical specifications per capability).
_SHARED_BYTES = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}
NEWEST_SHARED_BYTES = 101_376
# A card that is given by its memory alone has the multiprocessors of a mid-range one.
_MULTIPROCESSORS = 84


def names() -> list[str]:
    """The cards of the table."""
    return [name for name, *_ in _CARDS]


def card_named(name: str) -> Card:
    """The card of that name; case, blanks and a leading maker's name do not matter.

    Raises:
        ValueError: it is not in the table; the text names the closest.
    """
    wanted = _plain(name)
    for known, gib, capability, multiprocessors in _CARDS:
        if _plain(known) == wanted:
            return _card(known, int(gib * GIB), capability, multiprocessors)
    close = difflib.get_close_matches(wanted, [_plain(known) for known in names()], n=1)
    hint = next((f"; did you mean {known}?" for known in names() if _plain(known) in close), "")
    raise ValueError(f"{name!r} is not in the table of cards ({', '.join(names())}){hint}")


def card_of(size: int, capability: tuple[int, int], name: str = "a virtual GPU") -> Card:
    """A card with ``size`` bytes, all of which are usable."""
    return _card(name, size, capability, _MULTIPROCESSORS)


def _card(name: str, size: int, capability: tuple[int, int], multiprocessors: int) -> Card:
    shared = _SHARED_BYTES.get(capability, NEWEST_SHARED_BYTES)
    return Card(name, size, size, capability, multiprocessors, shared)


def _plain(name: str) -> str:
    words = name.lower().replace("nvidia", "").replace("geforce", "")
    return "".join(words.split())
