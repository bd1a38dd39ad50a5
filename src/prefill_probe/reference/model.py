"""The model: embedding, layers of GDN or attention with MoE, head. Weights are random, geometry is real."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from prefill_probe.reference.attention import Attention
from prefill_probe.reference.batch import Decode, Prefill
from prefill_probe.reference.config import GDN, ModelConfig
from prefill_probe.reference.gdn import Gdn
from prefill_probe.reference.moe import Experts, Moe
from prefill_probe.reference.pools import KvPool, StatePool
from prefill_probe.reference.weights import matrix, ones


class Model:
    """A decoder of ``config``'s geometry. All layers share one set of routed experts.

    Attributes:
        experts: that set.
        entered: called with the number of each layer of a chunk as it begins, and with -1 after the last.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._embedding = matrix(config.vocab_size, config.hidden_size, device=device)
        self.experts = Experts(config, device)
        self._layers = [_Layer(config, number, self.experts, device) for number in range(len(config.kinds))]
        self._norm = ones(config.hidden_size, device)
        self._head = matrix(config.vocab_size, config.hidden_size, device=device)
        self.entered: Callable[[int], None] = lambda number: None

    def prefill(self, batch: Prefill, kv: KvPool, states: StatePool) -> torch.Tensor:
        """One chunk; scores (len(batch.last), vocabulary) of the tokens that follow."""
        x = self._embed(batch.ids)
        for number, layer in enumerate(self._layers):
            self.entered(number)
            layer.prefill(x, batch, kv, states)
        self.entered(-1)
        return self._scores(x[batch.last])

    def decode(self, batch: Decode, kv: KvPool, states: StatePool) -> torch.Tensor:
        """One token of each sequence; scores (sequences, vocabulary) of the tokens that follow."""
        x = self._embed(batch.ids)
        for layer in self._layers:
            layer.decode(x, batch, kv, states)
        return self._scores(x)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self._embedding)

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.rms_norm(x, (self._config.hidden_size,), self._norm, self._config.eps)
        return functional.linear(x, self._head)


class _Layer:
    """Norm, mixer, norm, MoE; what comes in is added to in place."""

    def __init__(self, config: ModelConfig, number: int, experts: Experts, device: torch.device) -> None:
        self._shape, self._eps = (config.hidden_size,), config.eps
        self._before_mixer, self._before_moe = ones(config.hidden_size, device), ones(config.hidden_size, device)
        kind = config.kinds[number]
        same_before = config.kinds[:number].count(kind)
        self._gdn = Gdn(config, same_before, device) if kind == GDN else None
        self._attention = Attention(config, same_before, device) if kind != GDN else None
        self._moe = Moe(config, experts, device)

    def prefill(self, x: torch.Tensor, batch: Prefill, kv: KvPool, states: StatePool) -> None:
        normed = self._normed(x, self._before_mixer)
        x += self._gdn.prefill(normed, batch, states) if self._gdn else self._attend(normed, batch, kv)
        del normed
        x += self._moe(self._normed(x, self._before_moe))

    def decode(self, x: torch.Tensor, batch: Decode, kv: KvPool, states: StatePool) -> None:
        normed = self._normed(x, self._before_mixer)
        x += self._gdn.decode(normed, batch, states) if self._gdn else self._attend(normed, batch, kv)
        x += self._moe(self._normed(x, self._before_moe))

    def _attend(self, x: torch.Tensor, batch: Prefill | Decode, kv: KvPool) -> torch.Tensor:
        assert self._attention is not None
        if isinstance(batch, Prefill):
            return self._attention.prefill(x, batch, kv)
        return self._attention.decode(x, batch, kv)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self._shape, weight, self._eps)
