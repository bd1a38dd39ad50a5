"""The engine's own routers with its own dummy weights, on the CPU: what they choose, perturbed and as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")

EXPERTS, CHOICES, HIDDEN, TOKENS = 128, 8, 512, 1024
# A token misses a given expert with probability 1 - 8 / 128: after 1,024 tokens less than one in 10^28 experts is left.
CONFIG = SimpleNamespace(
    num_experts=EXPERTS,
    num_experts_per_tok=CHOICES,
    hidden_size=HIDDEN,
    intermediate_size=64,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=0,
    hidden_act="silu",
    swiglu_limit=7.0,
    rms_norm_eps=1e-6,
    moe_strategy="resident",
    decode_target="gpu",
    quant=None,
)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    import torch
    from freetoken.distributed import info

    before, info._TP_INFO = info._TP_INFO, info.DistributedInfo(0, 1)
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
    info._TP_INFO = before


def dummy(block: Any) -> Any:
    """With weights as ``--dummy-weight`` makes them."""
    import torch
    from freetoken.engine.engine import _make_dummy_weight_state_dict

    torch.manual_seed(42)
    block.load_state_dict(_make_dummy_weight_state_dict(block.state_dict(), device=torch.device("cpu")))
    return block


def contents(block: Any) -> dict[str, bytes]:
    import torch

    return {
        name: tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in block.state_dict().items()
    }


def minimax_m2() -> tuple[Any, Callable[[Any], Any]]:
    from freetoken.models.minimax_m2.moe import MiniMaxM2SparseMoeBlock

    block = dummy(MiniMaxM2SparseMoeBlock(CONFIG, 0))
    return block, lambda hidden: block._route(block.gate.forward(hidden))[1]


def glm4_moe() -> tuple[Any, Callable[[Any], Any]]:
    from freetoken.models.glm4_moe.moe import Glm4MoeSparseBlock

    block = dummy(Glm4MoeSparseBlock(CONFIG, 0))
    return block, lambda hidden: block._route(hidden)[1]


def deepseek_v4() -> tuple[Any, Callable[[Any], Any]]:
    """A layer that goes by a table; of the logits' kernel only the sums matter, and there is none for the CPU."""
    from freetoken.layers import BaseOP
    from freetoken.models.deepseek_v4.moe import Gate

    class Block(BaseOP):
        def __init__(self) -> None:
            arguments = SimpleNamespace(
                n_activated_experts=CHOICES,
                score_func="sqrtsoftplus",
                route_scale=1.0,
                n_hash_layers=1,
                n_routed_experts=EXPERTS,
                dim=HIDDEN,
                vocab_size=4 * TOKENS,
                vision_n_layers=0,
            )
            self.gate = Gate(0, arguments)
            self.experts = BaseOP()

    Block.__module__ = "freetoken.models.test"
    block = dummy(Block())
    return block, lambda hidden: block.gate.tid2eid[: len(hidden)]


def gemma4() -> tuple[Any, Callable[[Any], Any]]:
    from freetoken.models.gemma4.moe import Gemma4MLP

    block = dummy(Gemma4MLP(CONFIG, 0))
    return block, lambda hidden: block.router.proj.forward(hidden).float().topk(CHOICES)[1]


FAMILIES = [minimax_m2, glm4_moe, deepseek_v4, gemma4]
DEGENERATE = FAMILIES[:3]


def hidden_states() -> Any:
    import torch

    return torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_perturbed_routers_spread_a_chunk_over_all_experts_as_chance_would(family: Any) -> None:
    from engine_hooks.freetoken.routers import Perturbed

    block, choose = family()
    perturbed = Perturbed(block)
    assert (perturbed.routers, perturbed.left) == (1, [])
    chosen = choose(hidden_states()).long()
    assert all(len(set(row)) == CHOICES for row in chosen.tolist())
    loads = chosen.flatten().bincount(minlength=EXPERTS)
    assert int((loads > 0).sum()) == EXPERTS
    # 64 each on the average; columns of the weights differ in length, so some are chosen more often.
    assert int(loads.max()) < 2 * TOKENS * CHOICES / EXPERTS


@pytest.mark.parametrize("family", DEGENERATE)
def test_dummy_weights_send_every_token_to_the_same_expert(family: Any) -> None:
    """Or nothing of this is needed."""
    _, choose = family()
    loads = choose(hidden_states()).long().flatten().bincount()
    assert int(loads.max()) >= TOKENS
    assert int((loads > 0).sum()) < EXPERTS / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_restored_bit_for_bit(family: Any) -> None:
    from engine_hooks.freetoken.routers import Perturbed

    block, _ = family()
    before = contents(block)
    addresses = {name: tensor.data_ptr() for name, tensor in block.state_dict().items()}
    perturbed = Perturbed(block)
    assert contents(block) != before
    assert perturbed.restore()
    assert contents(block) == before
    assert {name: tensor.data_ptr() for name, tensor in block.state_dict().items()} == addresses
    assert perturbed.restore()
    assert contents(block) == before


def test_every_rank_gets_the_same_routers() -> None:
    from engine_hooks.freetoken.routers import Perturbed

    one, other = minimax_m2()[0], minimax_m2()[0]
    other.gate.weight.mul_(3)
    Perturbed(one), Perturbed(other)
    assert contents(one) == contents(other)


def test_views_and_weights_that_two_layers_share_are_restored() -> None:
    import torch
    from freetoken.layers import OPList

    from engine_hooks.freetoken.routers import Perturbed

    one, other, merged = minimax_m2()[0], minimax_m2()[0], torch.randn(EXPERTS, 2 * HIDDEN)
    one.gate.weight, other.gate.weight = merged[:, :HIDDEN], merged[:, HIDDEN:]
    other.e_score_correction_bias = one.e_score_correction_bias
    third = minimax_m2()[0]
    third.gate.weight = one.gate.weight
    before = merged.clone(), one.e_score_correction_bias.clone()
    perturbed = Perturbed(OPList([one, other, third]))
    assert perturbed.routers == 3
    assert not torch.equal(merged, before[0])
    assert perturbed.restore()
    assert torch.equal(merged, before[0])
    assert torch.equal(one.e_score_correction_bias, before[1])


def test_routers_of_torch_s_own_kind_are_found() -> None:
    """DeepSeek-V4's in 0.1.2: parameters, in a list of modules."""
    import torch
    from torch import nn

    from engine_hooks.freetoken.routers import Perturbed

    class Part(nn.Module):  # type: ignore[misc]
        __module__ = "freetoken.models.test"

    model, block = Part(), Part()
    block.experts, block.gate = Part(), Part()
    block.gate.weight = nn.Parameter(torch.ones(EXPERTS, HIDDEN), requires_grad=False)
    block.gate.bias = nn.Parameter(torch.ones(EXPERTS, dtype=torch.float32), requires_grad=False)
    model.layers = nn.ModuleList([block])
    perturbed = Perturbed(model)
    assert perturbed.routers == 1
    assert float(block.gate.weight.float().std()) == pytest.approx(HIDDEN**-0.5, rel=0.05)
    assert not block.gate.bias.any()
    assert perturbed.restore()
    assert torch.equal(block.gate.weight, torch.ones(EXPERTS, HIDDEN))
    assert torch.equal(block.gate.bias, torch.ones(EXPERTS, dtype=torch.float32))


def test_compressed_weights_are_left_alone_and_named() -> None:
    import torch

    from engine_hooks.freetoken.routers import Perturbed

    block, _ = minimax_m2()
    block.gate.weight = block.gate.weight.to(torch.float8_e4m3fn)
    before = contents(block)
    perturbed = Perturbed(block)
    assert (perturbed.routers, perturbed.left) == (0, ["they are compressed"])
    assert contents(block) == before


def test_a_failure_on_the_way_leaves_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from freetoken.layers import OPList

    from engine_hooks.freetoken import routers

    one, other = minimax_m2()[0], minimax_m2()[0]
    before = contents(one), contents(other)
    write, calls = routers.Perturbed._write, [0]

    def second_fails(self: Any, tensor: Any, values: Any) -> None:
        calls[0] += 1
        write(self, tensor, values)
        if calls[0] == 3:
            raise MemoryError("no host memory")

    monkeypatch.setattr(routers.Perturbed, "_write", second_fails)
    perturbed = routers.Perturbed(OPList([one, other]))
    assert (perturbed.routers, perturbed.left) == (0, ["MemoryError: no host memory"])
    assert (contents(one), contents(other)) == before


def test_an_interrupt_on_the_way_leaves_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_hooks.freetoken import routers

    block, _ = minimax_m2()
    before = contents(block)
    write = routers.Perturbed._write

    def interrupted(self: Any, tensor: Any, values: Any) -> None:
        write(self, tensor, values)
        raise KeyboardInterrupt

    monkeypatch.setattr(routers.Perturbed, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        routers.Perturbed(block)
    assert contents(block) == before


def engine_over(block: Any) -> Any:
    from engine_hooks.freetoken.engine import FreeTokenEngine

    engine = object.__new__(FreeTokenEngine)
    engine._scheduler = SimpleNamespace(engine=SimpleNamespace(model=block))
    engine.damaged = False
    return engine


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_whatever_ends_the_probe_they_are_restored(ending: type[BaseException]) -> None:
    block, _ = minimax_m2()
    before = contents(block)
    engine = engine_over(block)
    with pytest.raises(ending), engine.perturbed_routers():  # noqa: PT012
        assert contents(block) != before
        raise ending
    assert contents(block) == before
    assert not engine.damaged


def test_an_engine_whose_routers_could_not_be_restored_is_damaged() -> None:
    import torch

    class Lost(torch.Tensor):  # type: ignore[misc]
        lost = False

        def copy_(self, *given: Any) -> Any:
            if Lost.lost:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().copy_(*given)

    block, _ = minimax_m2()
    block.gate.weight = block.gate.weight.as_subclass(Lost)
    engine = engine_over(block)
    with engine.perturbed_routers():
        Lost.lost = True
    assert engine.damaged


@pytest.mark.parametrize(("checked", "dummies", "perturbs"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_only_a_check_of_dummy_weights_perturbs(
    checked: bool, dummies: bool, perturbs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_hooks.freetoken import boot
    from prefill_probe import stages

    if checked:
        monkeypatch.setenv(stages.VARIABLE, "/nowhere/stages")
    else:
        monkeypatch.delenv(stages.VARIABLE, raising=False)
    block, _ = minimax_m2()
    before = contents(block)
    engine = engine_over(block)
    engine._scheduler.config = SimpleNamespace(use_dummy_weight=dummies)
    with boot._perturbed_routers(engine) as perturbed:
        assert (contents(block) != before) == bool(perturbs)
    assert (perturbed.routers if perturbed else 0) == perturbs
    assert contents(block) == before


def test_the_record_says_so_also_where_a_router_was_left_alone() -> None:
    from memory_engine import MIB, MemoryEngine

    from engine_hooks.freetoken import boot
    from prefill_probe import ProbeSettings, probe

    record = probe(MemoryEngine(4096 * MIB), ProbeSettings())
    assert boot._with_routers(record, None) == record
    dense: Any = SimpleNamespace(routers=0, left=[])
    assert boot._with_routers(record, dense) == record
    some: Any = SimpleNamespace(routers=3, left=["they are compressed", "they are compressed"])
    told = boot._with_routers(record, some)
    assert told.perturbed_routers == 3
    assert [note for note in told.notes if "routers" in note] == [
        "the routers of 3 layers had other than their dummy weights",
        "routers with their dummy weights: they are compressed",
    ]
