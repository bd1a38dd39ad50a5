"""For acceptance runs with many starts: dummy expert banks are filled with one random block, over and over.

The engine draws every byte of them, which takes most of a start with dummy weights (5 GiB in 30 s). Put this folder on
PYTHONPATH. Sizes, placement and pinning of the banks are the engine's, and so is every byte of GPU memory. The other
weights are scaled, for the tokens of a model whose activations overflow say nothing.
"""

from __future__ import annotations

import sys
from typing import Any

_BLOCK_BYTES = 64 << 20


def quick_fill(module: Any) -> None:
    """Replace the module's filling of random bytes."""
    import torch

    original = module._dummy_fill
    block = torch.randint(0, 256, (_BLOCK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def fill(role: str, tensor: Any) -> None:
        packed = tensor.dtype in (torch.uint8, torch.int32) and not role.endswith(("_scale", "_global"))
        if not packed and not (tensor.is_floating_point() and tensor.element_size() == 2 and tensor.numel() > 1 << 20):
            original(role, tensor)
            return
        if packed:
            flat, source = tensor.view(torch.uint8).view(-1), block
        else:
            flat, source = tensor.view(-1), block.view(torch.int8)[: 1 << 20].to(tensor.dtype).div_(64)
        for start in range(0, flat.numel(), source.numel()):
            part = flat[start : start + source.numel()]
            part.copy_(source[: part.numel()])

    module._dummy_fill = fill


def finite_weights(module: Any) -> None:
    """Scale the weights that the module draws (see ``tame``)."""
    from tame import tame_weights

    original = module._make_dummy_weight_state_dict

    def make(*args: Any, **kwargs: Any) -> Any:
        weights = original(*args, **kwargs)
        tame_weights(weights)
        return weights

    module._make_dummy_weight_state_dict = make


_CHANGES = {"freetoken.moe.expert_banks": quick_fill, "freetoken.engine.engine": finite_weights}


class _Wait:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Wait())
