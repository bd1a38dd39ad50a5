"""Routers with dummy weights: perturbed so that they choose as trained ones do, and put back bit for bit.

The engine's dummies are normal with deviation 1, and whole numbers are 0 (``_make_dummy_weight_state_dict``, alike in
0.1.2 to 0.2.1). So logits have a deviation of the square root of the hidden size. A softmax router bears that. The
sigmoid of such a logit is 0 or 1, and the selection bias alone decides: all tokens go to the same few experts. A table
of experts by token (DeepSeek-V4's first layers) names expert 0 for every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# The parts of an MoE block that choose, beside its ``experts``; the same in every family and version.
_ROUTERS = ("gate", "router")
# DeepSeek-V4's: experts by token, (vocabulary, experts per token).
_TABLE = "tid2eid"
_DEEPEST = 12
_SEED = 20260102


@dataclass(frozen=True)
class Router:
    """The tensors by which one MoE block chooses.

    Attributes:
        weight: of the logits, (experts, hidden size); None where it is compressed, and cannot be written by value.
        biases: added to logits or to scores, (experts,).
        tables: experts by token.
    """

    weight: Any
    biases: tuple[Any, ...]
    tables: tuple[Any, ...]


class Perturbed:
    """The routers of ``model``, perturbed until ``restore``.

    Weights become normal with deviation ``hidden_size ** -0.5``, so that logits of normalised activations are about
    normal; biases become 0, tables random. In place, since captured graphs hold the addresses, and the same on every
    rank. The old contents are kept in host memory, so that nothing is added to what is measured.

    Attributes:
        routers: how many were perturbed.
        left: why others, or all, were left alone; empty if none was.
    """

    def __init__(self, model: Any) -> None:
        import torch

        self.routers = 0
        self.left: list[str] = []
        self._saved: list[tuple[Any, Any]] = []
        chance = torch.Generator().manual_seed(_SEED)
        try:
            with torch.inference_mode():
                for router in routers_of(model):
                    self._perturb(router, chance)
        except BaseException as error:  # of what was written nothing may stay
            if not self.restore() or not isinstance(error, Exception):
                raise
            self.routers = 0  # a chunk can be tried without
            self.left.append(f"{type(error).__name__}: {error}".splitlines()[0])

    def _perturb(self, router: Router, chance: Any) -> None:
        import torch

        if router.weight is None:
            self.left.append("they are compressed")
            return
        experts, hidden = router.weight.shape
        self._write(router.weight, torch.randn((experts, hidden), generator=chance) * hidden**-0.5)
        for bias in router.biases:
            self._write(bias, torch.zeros(experts))
        for table in router.tables:
            tokens, choices = table.shape
            # Neighbouring experts from a random one on: none twice.
            first = torch.randint(experts, (tokens, 1), generator=chance)
            self._write(table, (first + torch.arange(choices)) % experts)
        self.routers += 1

    def _write(self, tensor: Any, values: Any) -> None:
        self._saved.append((tensor, tensor.to("cpu", copy=True)))
        tensor.copy_(values.to(tensor.dtype))

    def restore(self) -> bool:
        """Put everything back; whether that could be done. Backwards: tensors may share their memory."""
        import torch

        try:
            with torch.inference_mode():
                while self._saved:
                    tensor, contents = self._saved[-1]
                    tensor.copy_(contents)
                    self._saved.pop()
        except Exception:  # the device is lost, for one; whoever asks knows what to do with such an engine
            return False
        return True


def routers_of(model: Any) -> list[Router]:
    """The routers of a model of the engine, in order."""
    found = []
    for block in _blocks(model, _DEEPEST):
        parts = [part for name in _ROUTERS for part in _tensors(block.get(name))]
        weight = next((each for _, each in parts if each.dim() == 2 and _is_plain(each)), None)
        # A selection bias may be the block's own.
        parts += [(name, each) for name, each in block.items() if _is_tensor(each)]
        biases = [each for name, each in parts if "bias" in name and each.dim() == 1 and _is_plain(each)]
        found.append(Router(weight, tuple(biases), tuple(each for name, each in parts if name == _TABLE)))
    return found


def _blocks(value: Any, deepest: int) -> Iterator[dict[str, Any]]:
    """Of every MoE block in ``value`` its members."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _blocks(each, deepest)
    elif deepest and _is_operator(value):
        members = _members(value)
        if "experts" in members and any(name in members for name in _ROUTERS):
            yield members
            return
        for each in members.values():
            yield from _blocks(each, deepest - 1)


def _tensors(value: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of an operator and of its parts, with the last part of its name."""
    for name, each in _members(value).items():
        if _is_tensor(each):
            yield name, each
        elif _is_operator(each):
            yield from _tensors(each)


def _members(value: Any) -> dict[str, Any]:
    """What an operator of the engine is made of, by name; of ``torch.nn`` ones as well, which 0.1.2 has."""
    members = dict(getattr(value, "__dict__", {}))
    for kind in ("_parameters", "_buffers", "_modules"):
        members |= members.pop(kind, None) or {}
    return members


def _is_operator(value: Any) -> bool:
    return type(value).__module__.startswith(("freetoken.models", "freetoken.layers", "torch.nn.modules"))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() and tensor.element_size() >= 2)
