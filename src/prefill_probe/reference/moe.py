"""Mixture of experts: top-k routing, and a grouped matrix product over tokens sorted by expert (Triton).

Every choice of an expert is a row: with T tokens and k choices, row ``t * k + j`` is token t's j-th choice. Rows are
sorted by expert, and each expert's are padded to whole blocks, so that a program of the kernel multiplies one block of
rows by a tile of one expert's weights. The first product reads token rows and writes ``silu(gate) * up``; the second
writes each row times its routing weight, and a token's k rows are summed.

Programs are ordered in groups of row blocks, so that weights are read again while they are in the L2 cache (source:
the grouped ordering of Triton's matrix multiplication tutorial). Tiles are chosen by shape and never tuned by trial:
what a chunk needs is then the same at every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from prefill_probe.reference.config import ModelConfig
from prefill_probe.reference.weights import matrix

# Row blocks that are walked together.
_GROUP = 8


@dataclass(frozen=True)
class Tiles:
    """A program's share of the work.

    Attributes:
        rows: of one expert.
        columns: of its weights; where gate and up are multiplied together, half of each.
        depth: multiplied at a time; ``stages`` such steps are in shared memory at once.
        warps: of the program.
    """

    rows: int
    columns: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3


def tiles_for(rows: int, experts: int) -> Tiles:
    """Tiles for ``rows`` rows spread over ``experts`` experts: about half of their mean load.

    Larger tiles would be filled to less than half where loads scatter around the mean. Three stages of the largest
    take 96 KiB of shared memory, which every card of compute capability 8.0 and higher has.
    """
    load = rows // experts
    if load <= 16:
        return Tiles(16)
    if load <= 48:
        return Tiles(32)
    return Tiles(64) if load <= 320 else Tiles(128, warps=8)


def route(scores: torch.Tensor, experts_per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the highest scores, and their softmax weights, which sum to one.

    Args:
        scores: (tokens, experts), of the router.

    Returns:
        weights (tokens, experts_per_token) in float32, ids (tokens, experts_per_token) in int64.
    """
    weights, ids = torch.softmax(scores, dim=-1, dtype=torch.float32).topk(experts_per_token, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def sort_rows(ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, each expert's padded to whole blocks. The sizes depend on shapes alone.

    Args:
        ids: (tokens, choices), expert of each row.

    Returns:
        rows: int32 (blocks * block,), row numbers; padding is the number of rows, which is no row.
        expert_of: int32 (blocks,), the expert of each block; blocks that are not used: ``experts``, which is none.
    """
    flat = ids.flatten()
    total = flat.numel()
    blocks = min(total, (total + experts * (block - 1)) // block)
    by_expert, order = flat.sort(stable=True)
    every = torch.arange(experts + 1, device=ids.device)
    first = torch.searchsorted(by_expert, every)
    padded = (first.diff() + block - 1) // block * block
    ends = padded.cumsum(0)
    place = torch.arange(total, device=ids.device) + (ends - padded - first[:-1])[by_expert]
    rows = torch.full((blocks * block,), total, dtype=torch.int32, device=ids.device)
    rows.scatter_(0, place, order.to(torch.int32))
    starts = torch.arange(0, blocks * block, block, device=ids.device)
    return rows, torch.searchsorted(ends, starts, right=True, out_int32=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _grouped_product(  # type: ignore[no-untyped-def]
    x, weights, out, scales, rows, expert_of,
    blocks, total, experts, choices,
    depth: tl.constexpr, width: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[row] = x[row // choices] @ weights[expert].T, by block of sorted rows and tile of columns.

    GATED: weights hold ``width`` gate rows and then ``width`` up rows, and out is silu(gate) * up; else out is scaled.
    """
    column_blocks = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0)
    group = program // (GROUP * column_blocks)
    inside = program % (GROUP * column_blocks)
    group_rows = tl.minimum(blocks - group * GROUP, GROUP)
    row_block = group * GROUP + inside % group_rows
    column_block = inside // group_rows

    expert = tl.load(expert_of + row_block).to(tl.int64)
    if expert >= experts:
        return
    row = tl.load(rows + row_block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = row < total
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    x_at = x + (row // choices)[:, None] * depth + inner[None, :]
    # Columns beyond the width are computed from the last ones, and not stored.
    weight_row = tl.minimum(column, width - 1)
    if GATED:
        weight_at = weights + expert * 2 * width * depth + weight_row[None, :] * depth + inner[:, None]
    else:
        weight_at = weights + expert * width * depth + weight_row[None, :] * depth + inner[:, None]
    first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        if depth % DEPTH == 0:
            a = tl.load(x_at, mask=real[:, None], other=0.0)
            b = tl.load(weight_at)
        else:
            left = depth - start
            a = tl.load(x_at, mask=real[:, None] & (inner[None, :] < left), other=0.0)
            b = tl.load(weight_at, mask=inner[:, None] < left, other=0.0)
        first = tl.dot(a, b, first)
        if GATED:
            if depth % DEPTH == 0:
                c = tl.load(weight_at + width * depth)
            else:
                c = tl.load(weight_at + width * depth, mask=inner[:, None] < depth - start, other=0.0)
            second = tl.dot(a, c, second)
        x_at += DEPTH
        weight_at += DEPTH
    if GATED:
        first = first * tl.sigmoid(first) * second
    else:
        first = first * tl.load(scales + row, mask=real, other=0.0)[:, None]
    out_at = out + row[:, None] * width + column[None, :]
    tl.store(out_at, first.to(out.dtype.element_ty), mask=real[:, None] & (column[None, :] < width))


def experts_product(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Every token through its experts: ``sum_j weights[t, j] * down[e] @ (silu(gate[e] @ x) * (up[e] @ x))``.

    Args:
        x: (tokens, hidden), contiguous.
        gate_up: (experts, 2 * inner, hidden), gate rows first; down: (experts, hidden, inner); both contiguous.
        weights: float32 (tokens, choices), contiguous; ids: (tokens, choices).
        tiles: instead of those for this shape.

    Returns:
        (tokens, hidden), in ``x``'s type; sums are kept in float32.
    """
    tokens, hidden = x.shape
    experts, _, inner = down.shape
    choices = ids.shape[1]
    tiles = tiles or tiles_for(ids.numel(), experts)
    rows, expert_of = sort_rows(ids, experts, tiles.rows)
    middle = x.new_empty(tokens * choices, inner)
    _launch(x, gate_up, middle, weights, rows, expert_of, choices, tiles, gated=True)
    out = x.new_empty(tokens * choices, hidden)
    _launch(middle, down, out, weights, rows, expert_of, 1, tiles, gated=False)
    del middle
    return out.view(tokens, choices, hidden).sum(dim=1)


def _launch(
    x: torch.Tensor,
    matrices: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    expert_of: torch.Tensor,
    choices: int,
    tiles: Tiles,
    *,
    gated: bool,
) -> None:
    total, width = out.shape
    columns = tiles.columns // 2 if gated else tiles.columns
    blocks = expert_of.numel()
    kernel: Any = _grouped_product
    kernel[(blocks * triton.cdiv(width, columns),)](
        x, matrices, out, scales, rows, expert_of,
        blocks, total, matrices.shape[0], choices,
        depth=x.shape[1], width=width, GATED=gated,
        ROWS=tiles.rows, COLUMNS=columns, DEPTH=tiles.depth, GROUP=_GROUP,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


class Experts:
    """The routed experts' weights, and what their routers chose while somebody looks on."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        size, hidden = config.expert_size, config.hidden_size
        self.gate_up = matrix(config.experts, 2 * size, hidden, device=device)
        self.down = matrix(config.experts, hidden, size, device=device)
        self.seen: list[torch.Tensor] | None = None


class Moe:
    """One MoE layer: a router of its own over ``experts``, and a shared expert behind a sigmoid gate."""

    def __init__(self, config: ModelConfig, experts: Experts, device: torch.device) -> None:
        hidden, shared = config.hidden_size, config.shared_size
        self._experts = experts
        self._choices = config.experts_per_token
        self._router = matrix(config.experts, hidden, device=device)
        self._shared_gate_up = matrix(2 * shared, hidden, device=device)
        self._shared_down = matrix(hidden, shared, device=device)
        self._shared_gate = matrix(1, hidden, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        gate, up = functional.linear(x, self._shared_gate_up).chunk(2, dim=-1)
        out = functional.linear(functional.silu(gate) * up, self._shared_down)
        del gate, up
        out *= torch.sigmoid(functional.linear(x, self._shared_gate))
        weights, ids = route(functional.linear(x, self._router), self._choices)
        if self._experts.seen is not None:
            self._experts.seen.append(ids.cpu())
        out += experts_product(x, self._experts.gate_up, self._experts.down, weights, ids)
        return out
