"""Gated attention over a paged KV pool: torch's flash kernel for a chunk, a Triton kernel for a decode step.

A chunk attends to its own tokens causally, and to the tokens before it block by block: a block's keys and values are
gathered from the pool's pages, attended to in full, and merged by the softmax sums (source of the merge: the online
softmax, arXiv 1805.02867). So what a deep chunk needs does not grow with its depth.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from prefill_probe.reference.batch import Decode, Prefill
from prefill_probe.reference.config import ModelConfig
from prefill_probe.reference.pools import PAGE_TOKENS, KvPool
from prefill_probe.reference.weights import matrix, ones

# Tokens before the chunk that are gathered at a time.
HISTORY_BLOCK = 16_384
# A tile of query heads that the tensor cores take.
_LEAST_HEADS = 16


class Attention:
    """One attention layer; ``number`` is its place in the KV pool."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device) -> None:
        size = config.head_dim
        self._config, self._number = config, number
        self._in = matrix((2 * config.heads + 2 * config.kv_heads) * size, config.hidden_size, device=device)
        self._q_norm, self._k_norm = ones(size, device), ones(size, device)
        self._out = matrix(config.hidden_size, config.heads * size, device=device)
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
        self._frequencies = config.rotary_base**-exponents

    def prefill(self, x: torch.Tensor, batch: Prefill, pool: KvPool) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        q, k, v, gate = self._project(x, batch.positions)
        keys, values = pool.keys[self._number], pool.values[self._number]
        keys.index_copy_(0, batch.rows, k)
        values.index_copy_(0, batch.rows, v)
        out = torch.empty_like(q)
        for span in batch.spans:
            own = slice(span.start, span.end)
            out[own] = attend(q[own], k[own], v[own], keys, values, span.history)
        return self._finish(out, gate)

    def decode(self, x: torch.Tensor, batch: Decode, pool: KvPool) -> torch.Tensor:
        """(sequences, hidden) -> (sequences, hidden), one token each."""
        q, k, v, gate = self._project(x, batch.positions)
        keys, values = pool.keys[self._number], pool.values[self._number]
        keys.index_copy_(0, batch.rows, k)
        values.index_copy_(0, batch.rows, v)
        return self._finish(attend_one(q, keys, values, batch.pages, batch.positions + 1), gate)

    def _project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values (tokens, heads, head_dim), normed and rotated, and the output gate."""
        config, size = self._config, self._config.head_dim
        q, gate, k, v = (
            functional.linear(x, self._in)
            .unflatten(-1, (-1, size))
            .split([config.heads, config.heads, config.kv_heads, config.kv_heads], dim=1)
        )
        q = functional.rms_norm(q.contiguous(), (size,), self._q_norm, config.eps)
        k = functional.rms_norm(k.contiguous(), (size,), self._k_norm, config.eps)
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        _rotate(q, cos, sin)
        _rotate(k, cos, sin)
        return q, k, v, gate

    def _finish(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return functional.linear((out * torch.sigmoid(gate)).flatten(1), self._out)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate, in place, the first dimensions of every head by its position (arXiv 2104.09864, halves as pairs)."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = first * cos - second * sin, second * cos + first * sin
    x[..., :half], x[..., half : 2 * half] = turned


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    history: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of one sequence's chunk, over its own tokens and those before it.

    Args:
        q: (tokens, heads, head_dim); k, v: (tokens, kv_heads, head_dim), of the chunk.
        keys, values: (pool rows, kv_heads, head_dim).
        history: int64, pool rows of the tokens before the chunk.

    Returns:
        (tokens, heads, head_dim).
    """
    out, sums = _flash(q, k, v, causal=True)
    for rows in history.split(HISTORY_BLOCK) if len(history) else ():
        part, part_sums = _flash(q, keys[rows], values[rows], causal=False)
        # Each share for itself: near 1, what bf16 or a difference from 1 leaves of the other would be noise.
        kept, added = (torch.sigmoid(each).t().unsqueeze(-1) for each in (sums - part_sums, part_sums - sums))
        out.mul_(kept).add_(part.mul_(added))
        sums = torch.logaddexp(sums, part_sums)
    return out


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The flash kernel of ``scaled_dot_product_attention``, by its own name: only so does it give the softmax sums.

    Returns:
        (tokens, heads, head_dim), and float32 (heads, tokens): the logarithm of each softmax's sum.
    """
    batched = [each.transpose(0, 1).unsqueeze(0) for each in (q, k, v)]
    out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*batched, 0.0, causal)
    return out[0].transpose(0, 1), sums[0]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _decode_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, pages, lengths, out, scale, heads, kv_heads, table_width,
    GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One sequence and one KV head a program: its GROUP query heads over the sequence's pages, one by one."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    head = tl.arange(0, LEAST)
    inner = tl.arange(0, SIZE)
    token = tl.arange(0, PAGE)
    length = tl.load(lengths + sequence)
    q_at = (sequence * heads + kv_head * GROUP + head)[:, None] * SIZE + inner[None, :]
    query = tl.load(q + q_at, mask=head[:, None] < GROUP, other=0.0)
    highest = tl.full((LEAST,), float("-inf"), tl.float32)
    total = tl.zeros((LEAST,), tl.float32)
    mixed = tl.zeros((LEAST, SIZE), tl.float32)
    number = 0
    while number * PAGE < length:
        page = tl.load(pages + sequence * table_width + number).to(tl.int64)
        valid = number * PAGE + token < length
        at = ((page * PAGE + token) * kv_heads + kv_head)[:, None] * SIZE + inner[None, :]
        key = tl.load(keys + at, mask=valid[:, None], other=0.0)
        scores = tl.where(valid[None, :], tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp(scores - top[:, None])
        kept = tl.exp(highest - top)
        value = tl.load(values + at, mask=valid[:, None], other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(shares.to(value.dtype), value)
        total = total * kept + tl.sum(shares, 1)
        highest = top
        number += 1
    tl.store(out + q_at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=head[:, None] < GROUP)


def attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Attention of one token of each sequence over its pages.

    Args:
        q: (sequences, heads, head_dim).
        keys, values: (pool rows, kv_heads, head_dim), contiguous.
        pages: int32 (sequences, width), page table; lengths: int64 (sequences,), tokens with this one.

    Returns:
        (sequences, heads, head_dim).
    """
    q = q.contiguous()
    sequences, heads, size = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(q)
    kernel: Any = _decode_kernel
    kernel[(sequences, kv_heads)](
        q, keys, values, pages, lengths, out, size**-0.5, heads, kv_heads, pages.shape[1],
        GROUP=group, SIZE=size, PAGE=PAGE_TOKENS, LEAST=max(_LEAST_HEADS, triton.next_power_of_2(group)),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
