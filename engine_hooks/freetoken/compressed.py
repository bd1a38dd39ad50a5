"""Weights of a size that only their values tell: GLM-4.5's attention and embeddings, losslessly compressed (DF11).

The engine makes empty placeholders for them and takes whatever its weight reader brings. Dummies have the size of
normally distributed weights, as the engine's own compressor packs a sample of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_ARCHITECTURES = {"Glm4MoeForCausalLM"}
_SAMPLE_SHAPE = (256, 256)


@contextlib.contextmanager
def answered(config: Any) -> Iterator[None]:
    """Placeholders have the size of packed weights while the block runs, where ``config``'s model has any."""
    if not _ARCHITECTURES.intersection(config.model_config.architectures):
        yield
        return
    package = "freetoken.models.glm4_moe"
    linear = importlib.import_module(f"{package}.df11_linear")
    embedding = importlib.import_module(f"{package}.df11_embedding")
    format_of = importlib.import_module("freetoken.kernel.triton.df11")
    chunk, lut = format_of.DF11_CHUNK, 1 << format_of.DF11_LMAX
    with contextlib.ExitStack() as stack:
        for owner, chunks in (
            (linear.LinearDF11, lambda layer: -(-layer.n // chunk)),
            (embedding.EmbeddingDF11, lambda layer: layer.num_embeddings),
        ):
            stack.enter_context(mock.patch.object(owner, "__init__", _sized(owner.__init__, chunks, lut)))
        yield


def _sized(original: Any, chunks: Any, lut: int) -> Any:
    """A layer's ``__init__`` whose placeholders have a size: ``chunks(layer)`` streams, and a table of ``lut``."""

    @functools.wraps(original)
    def init(layer: Any, *args: Any, **kwargs: Any) -> None:
        original(layer, *args, **kwargs)
        words = -(-int(layer.n * _bits_per_weight()) // 32)
        for name, size in (("low8", layer.n), ("bitstream", words), ("chunk_start", chunks(layer)), ("lut", lut)):
            setattr(layer, name, getattr(layer, name).new_empty(size))

    return init


@functools.cache
def _bits_per_weight() -> float:
    """Bits of the packed stream for one weight, beside the eight that are kept as they are."""
    compress = importlib.import_module("freetoken.kernel.triton.df11").df11_compress
    with torch.device("cpu"):
        weights = torch.randn(_SAMPLE_SHAPE, generator=torch.Generator("cpu").manual_seed(0)).to(torch.bfloat16)
        return float(compress(weights)["bitstream"].numel() * 32 / weights.numel())
