"""What the reference engine's kernels compute, written down plainly, in float64."""

from __future__ import annotations

import torch


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    exact = exact.to("cpu", torch.float64)
    return float((found.to("cpu", torch.float64) - exact).norm() / exact.norm())


def experts_one_by_one(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """A loop over experts: ``sum_j weights[t, j] * down[e] @ (silu(gate[e] @ x) * (up[e] @ x))``."""
    x, weights = x.double(), weights.double()
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].double().T).chunk(2, dim=-1)
        result = (gate * torch.sigmoid(gate) * up) @ down[expert].double().T
        out.index_add_(0, token, result * weights[token, choice, None])
    return out


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule of one sequence, token by token (arXiv 2412.06464, equation 10).

    q, k: (tokens, heads, key), of norm 1 after this function's own normalisation; v: (tokens, heads, value); decay
    (logarithm) and beta: (tokens, heads); state: (heads, key, value). Query heads are repeated by the caller.
    """
    q, k, v, decay, beta, state = (each.double() for each in (q, k, v, decay, beta, state))
    q = q / q.norm(dim=-1, keepdim=True) * q.shape[-1] ** -0.5
    k = k / k.norm(dim=-1, keepdim=True)
    out = []
    for token in range(q.shape[0]):
        state = state * decay[token].exp()[:, None, None]
        seen = torch.einsum("hk,hkv->hv", k[token], state)
        write = (v[token] - seen) * beta[token, :, None]
        state = state + torch.einsum("hk,hv->hkv", k[token], write)
        out.append(torch.einsum("hk,hkv->hv", q[token], state))
    return torch.stack(out), state


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of the last ``len(q)`` tokens of a sequence: q (tokens, heads, size); k, v (all, kv_heads, size)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    position = torch.arange(k.shape[0], device=q.device)
    later = position[None, :] > position[k.shape[0] - q.shape[0] :, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)


def attention_of_one(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    page_tokens: int,
) -> torch.Tensor:
    """Attention of one token of each sequence over the pages of its row of ``table``."""
    out = []
    for sequence, length in enumerate(lengths.tolist()):
        rows = [int(table[sequence, at // page_tokens]) * page_tokens + at % page_tokens for at in range(length)]
        out.append(causal(q[sequence, None], keys[rows], values[rows])[0])
    return torch.stack(out)
