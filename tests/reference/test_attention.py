"""How a chunk's attention is put together; the kernels themselves: test_kernels.py, tests/gpu/."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from exact import causal, relative_error  # noqa: E402

from prefill_probe.reference import attention  # noqa: E402


def exact_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the flash kernel gives: attention, and the logarithms of its softmax sums."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("cached", [0, 1, 63, 64, 65, 200])
def test_blocks_before_the_chunk_are_merged_into_attention_over_all(
    monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    monkeypatch.setattr(attention, "_flash", exact_flash)
    monkeypatch.setattr(attention, "HISTORY_BLOCK", 64)
    torch.manual_seed(cached)
    # Large scores, so that one block can outweigh the others.
    q, k, v = 4 * torch.randn(10, 6, 16), torch.randn(10, 2, 16), torch.randn(10, 2, 16)
    keys, values = torch.randn(2, 300, 2, 16)
    rows = torch.randperm(300)[:cached]
    found = attention.attend(q, k, v, keys, values, rows)
    assert relative_error(found, causal(q, torch.cat([keys[rows], k]), torch.cat([values[rows], v]))) < 1e-5


def test_many_blocks_in_bf16_lose_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short chunk after a long history: nearly all of the weight is in the blocks, next to none in the chunk."""

    def flash(*inputs: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        out, sums = exact_flash(*(each.float() for each in inputs), causal=causal)
        return out.bfloat16(), sums

    monkeypatch.setattr(attention, "_flash", flash)
    monkeypatch.setattr(attention, "HISTORY_BLOCK", 4096)
    torch.manual_seed(1)
    q, k, v = (torch.randn(20, heads, 64).bfloat16() for heads in (4, 2, 2))
    keys, values = torch.randn(2, 16_384, 2, 64).bfloat16()
    rows = torch.randperm(16_384)
    found = attention.attend(q, k, v, keys, values, rows)
    assert relative_error(found, causal(q, torch.cat([keys[rows], k]), torch.cat([values[rows], v]))) < 1e-2


def test_rotated_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, 1, 32)
    frequencies = 100.0 ** -(torch.arange(0, 8, 2) / 8)

    def product(q_at: int, k_at: int) -> float:
        rotated = []
        for vector, position in ((q, q_at), (k, k_at)):
            angles = torch.tensor([[position]]).float() * frequencies
            rotated.append(vector.clone())
            attention._rotate(rotated[-1], angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))
        return float((rotated[0] * rotated[1]).sum())

    assert product(105, 98) == pytest.approx(product(12, 5), rel=1e-4)
    assert product(105, 98) != pytest.approx(product(105, 90), rel=1e-2)
