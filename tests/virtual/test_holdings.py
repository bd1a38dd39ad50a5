"""What the engine says it holds is what the virtual GPU's allocator has handed out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from warm import document

from engine_hooks.freetoken.holdings import holdings
from prefill_probe.geometry import make_model
from prefill_probe.sizes import GIB, MIB
from prefill_probe.virtual import virtual_gpu
from prefill_probe.virtual.cards import card_of

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("freetoken")
    model = make_model(tmp_path_factory.mktemp("model"), "flash-next-nvfp4", layers=4)
    return document(HERE / "holdings.py", str(model))


@pytest.mark.engine
def test_pools_are_as_large_as_the_engine_s_own_formulas_say(found: dict[str, Any]) -> None:
    held = found["holdings"]
    # One page more: the one that padding writes to.
    assert held["kv_pool"] == pytest.approx(found["kv_formula"], abs=found["page"])
    assert held["state_pool"] == found["state_formula"]
    # The buffers of overlapped prefill are borrowed from the same slots; beside those there is only bookkeeping.
    assert held["expert_cache"] == pytest.approx(found["slot"] * 1024, abs=MIB)
    # With the rotary tables, which are no parameters: 262,144 positions of 64 floats.
    assert held["weights"] == pytest.approx(found["state_dict"] + 262144 * 64 * 4, abs=MIB)
    assert held["graphs"] >= found["graph_pools"] > 0


@pytest.mark.engine
def test_the_sum_is_what_the_allocator_has_handed_out(found: dict[str, Any]) -> None:
    named = sum(found["holdings"].values()) - found["graph_pools"]
    explained = named + found["tables"] + found["workspaces"]
    # What is left is rounding to 512 bytes, and a few small index tensors.
    assert 0 <= found["allocated"] - explained < 128 * 1024
    assert found["grown"] == 0


@pytest.mark.engine
def test_layers_are_marked_in_the_allocator_s_own_count_and_left_as_they_were(found: dict[str, Any]) -> None:
    assert found["traced"] == found["allocations"] > 100
    assert [layer for _, layer in found["marks"]] == [0, -1, 1, -1, 2, -1, 3, -1]
    counts = [count for count, _ in found["marks"]]
    assert counts == sorted(counts)
    assert found["left_wrapped"] == 0


def test_views_and_tied_tensors_are_counted_once_and_belong_to_the_first() -> None:
    if torch.cuda.is_available():
        pytest.skip("this process has a real GPU")
    with virtual_gpu(card_of(16 * GIB, (12, 0))):
        buffer = torch.empty(2, 5 * MIB, dtype=torch.uint8, device="cuda")
        tied = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        engine = SimpleNamespace(
            kv_cache={"k": buffer[0], "v": [buffer[1], buffer[1][100:]]},
            linear_state_pool=None,
            moe_offload_cache=({"host": torch.empty(7 * MIB, dtype=torch.uint8)},),
            graph_runner=SimpleNamespace(buffer=None),
            attn_backend=object(),
            model=[tied, {"head": tied.view(3, MIB), "cache": buffer}, torch.empty(0, device="cuda")],
        )
        assert holdings(engine, 2 * MIB) == {
            "weights": 3 * MIB,
            "expert_cache": 0,
            "kv_pool": 10 * MIB,
            "state_pool": 0,
            "graphs": 2 * MIB,
        }
