"""What one forward is given: tokens of several sequences, where their keys go, and which state is theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """One sequence's part of a prefill batch.

    Attributes:
        start, end: its tokens in the batch.
        history: int64, rows of the KV pool that hold the tokens before them; empty for a fresh sequence.
    """

    start: int
    end: int
    history: torch.Tensor


@dataclass(frozen=True)
class Prefill:
    """A chunk.

    Attributes:
        ids, positions: int64 (tokens,).
        rows: int64 (tokens,), rows of the KV pool that their keys and values go to.
        states: int64 (sequences,), slots of the recurrent state.
        bounds: int64 (sequences + 1,), the first token of each sequence, and the end.
        last: int64, the tokens that a next token is wanted for.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    states: torch.Tensor
    bounds: torch.Tensor
    last: torch.Tensor
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Decode:
    """One token of each sequence. All tensors stay where they are, so that a captured graph can be replayed.

    Attributes:
        ids, positions, rows, states: int64 (sequences,), as in ``Prefill``.
        pages: int32 (sequences, pages of the longest sequence), the page table.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    states: torch.Tensor
    pages: torch.Tensor
