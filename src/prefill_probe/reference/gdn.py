"""Gated delta net: short convolution, gated delta rule, gated norm (arXiv 2412.06464; kernels: flash-linear-attention).

A prefill chunk goes through the chunked kernel, a decode step through the recurrent one; both read and write the
sequences' slots of the state pool.
"""

from __future__ import annotations

import torch
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from torch.nn import functional

from prefill_probe.reference.batch import Decode, Prefill
from prefill_probe.reference.config import ModelConfig
from prefill_probe.reference.pools import StatePool
from prefill_probe.reference.weights import matrix, ones

# Tokens of a sequence that share one entry of the state that the chunked kernel keeps (its default).
CHUNK = 64


class Gdn:
    """One GDN layer; ``number`` is its place in the state pool."""

    def __init__(self, config: ModelConfig, number: int, device: torch.device) -> None:
        values = config.value_heads * config.value_dim
        self._config, self._number = config, number
        self._in = matrix(config.conv_size, config.hidden_size, device=device)
        self._gate = matrix(values, config.hidden_size, device=device)
        self._decay_beta = matrix(2 * config.value_heads, config.hidden_size, device=device)
        self._conv = matrix(config.conv_size, config.conv_width, device=device)
        # Between almost no and strong forgetting.
        self._log_decay = torch.linspace(-2.0, 2.0, config.value_heads, device=device)
        self._decay_bias = torch.zeros(config.value_heads, device=device)
        self._norm = ones(config.value_dim, device)
        self._out = matrix(config.hidden_size, values, device=device)

    def prefill(self, x: torch.Tensor, batch: Prefill, pool: StatePool) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        conv, recurrent = pool.conv[self._number], pool.recurrent[self._number]
        mixed, conv_end = causal_conv1d(
            functional.linear(x, self._in).unsqueeze(0),
            self._conv,
            initial_state=conv[batch.states],
            output_final_state=True,
            activation="silu",
            cu_seqlens=batch.bounds,
        )
        conv.index_copy_(0, batch.states, conv_end)
        decay, beta = self._decay_and_beta(x.unsqueeze(0))
        out, end = chunk_gated_delta_rule(
            *self._heads(mixed),
            g=decay,
            beta=beta,
            initial_state=recurrent[batch.states],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=batch.bounds,
        )
        del mixed
        recurrent.index_copy_(0, batch.states, end)
        return self._gated(out, x)

    def decode(self, x: torch.Tensor, batch: Decode, pool: StatePool) -> torch.Tensor:
        """(sequences, hidden) -> (sequences, hidden), one token each."""
        conv, recurrent = pool.conv[self._number], pool.recurrent[self._number]
        window = conv[batch.states]
        mixed, window = causal_conv1d_update(
            functional.linear(x, self._in), window, weight=self._conv, activation="silu"
        )
        conv.index_copy_(0, batch.states, window)
        decay, beta = self._decay_and_beta(x.unsqueeze(1))
        out, end = fused_recurrent_gated_delta_rule(
            *self._heads(mixed.unsqueeze(1)),
            g=decay,
            beta=beta,
            initial_state=recurrent[batch.states],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        recurrent.index_copy_(0, batch.states, end)
        return self._gated(out, x)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys (both of ``key_heads``) and values of what came out of the convolution."""
        config = self._config
        keys = config.key_heads * config.key_dim
        q, k, v = mixed.split([keys, keys, config.value_heads * config.value_dim], dim=-1)
        return (
            q.unflatten(-1, (config.key_heads, -1)),
            k.unflatten(-1, (config.key_heads, -1)),
            v.unflatten(-1, (config.value_heads, -1)),
        )

    def _decay_and_beta(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By value head: the logarithm of what is kept (float32), and how much is written."""
        decay, beta = functional.linear(x, self._decay_beta).chunk(2, dim=-1)
        kept = -self._log_decay.exp() * functional.softplus(decay.float() + self._decay_bias)
        return kept, beta.sigmoid()

    def _gated(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gate = functional.linear(x, self._gate).view(out.shape)
        out = rms_norm_gated(out, gate, self._norm, None, activation=self._config.gate, eps=self._config.eps)
        return functional.linear(out.reshape(x.shape[0], -1), self._out)
