"""The pools: pages of keys and values, slots of recurrent state, and their free lists."""

from __future__ import annotations

import torch

from prefill_probe.reference.config import ATTENTION, GDN, ModelConfig

PAGE_TOKENS = 64
# Page and slot 0 are never handed out: rows of a captured decode step that no request uses write there.
_RESERVED = 1


def page_bytes(config: ModelConfig) -> int:
    """Bytes of one KV page, over all attention layers, in bf16."""
    return 2 * 2 * config.count(ATTENTION) * PAGE_TOKENS * config.kv_heads * config.head_dim


class KvPool:
    """Keys and values of every attention layer.

    Attributes:
        keys, values: by attention layer, bf16 (pages * PAGE_TOKENS, kv_heads, head_dim).
        free: numbers of free pages; taken from the end.
    """

    def __init__(self, config: ModelConfig, pages: int, device: torch.device) -> None:
        shape = (2, pages * PAGE_TOKENS, config.kv_heads, config.head_dim)
        layers = [
            torch.zeros(shape, dtype=torch.bfloat16, device=device).unbind(0) for _ in range(config.count(ATTENTION))
        ]
        self.keys = [keys for keys, _ in layers]
        self.values = [values for _, values in layers]
        self.pages = pages
        # In no order, as a list that has been used has them.
        chance = torch.Generator().manual_seed(pages)
        self.free: list[int] = (_RESERVED + torch.randperm(pages - _RESERVED, generator=chance)).tolist()

    @property
    def usable_pages(self) -> int:
        """Pages that requests can have."""
        return self.pages - _RESERVED


class StatePool:
    """Recurrent state of GDN layers.

    Attributes:
        conv: bf16 (layers, slots, channels, conv_width); recurrent: float32 (layers, slots, heads, key, value).
        free: numbers of free slots; taken from the end.
    """

    def __init__(self, config: ModelConfig, slots: int, device: torch.device) -> None:
        slots += _RESERVED
        layers = config.count(GDN)
        state = (config.value_heads, config.key_dim, config.value_dim)
        self.conv = torch.zeros(
            (layers, slots, config.conv_size, config.conv_width), dtype=torch.bfloat16, device=device
        )
        self.recurrent = torch.zeros((layers, slots, *state), device=device)
        self.free = list(range(_RESERVED, slots))

    def copy(self, source: int, target: int) -> None:
        """Restore a snapshot: the state of one slot into another."""
        self.conv[:, target].copy_(self.conv[:, source])
        self.recurrent[:, target].copy_(self.recurrent[:, source])

    def clear(self, slot: int) -> None:
        """Zero a slot; allocates nothing, so that it works when no memory is left."""
        self.conv[:, slot].zero_()
        self.recurrent[:, slot].zero_()
