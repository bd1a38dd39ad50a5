"""Places of the engine in a person's words, and what its routers choose."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from engine_hooks.freetoken.sites import place_of, site_of
from prefill_probe.composition import Frame

ROOT = "/usr/lib/python3/site-packages/freetoken/"
BELOW: tuple[Frame, ...] = ((ROOT + "engine/engine.py", 9, "forward_batch"), ("/opt/run.py", 1, "main"))


@pytest.mark.parametrize(
    ("inner", "component", "place"),
    [
        ((("kernel/fla/chunk_delta_h.py", 326, "chunk_fwd"),), "GDN", "GDN chunk_delta_h (chunk_delta_h.py:326)"),
        (
            (("layers/linear.py", 4, "forward"), ("moe/fused.py", 7, "apply")),
            "MoE",
            "linear layer (linear.py:4)",
        ),
        ((("attention/qsa_sparse.py", 3, "forward"),), "attention", "QSA attention (qsa_sparse.py:3)"),
        ((("models/qwen3_5_moe/gdn.py", 5, "forward"),), "GDN", "GDN (gdn.py:5)"),
        ((("models/qwen3_5_moe/model.py", 6, "forward"),), "hidden states", "hidden states (model.py:6)"),
        ((("models/qwen3_5_moe/moe.py", 8, "forward"),), "MoE", "MoE (moe.py:8)"),
        ((("layers/embedding.py", 2, "lm_head"),), "head", "head (embedding.py:2)"),
        ((("models/qwen3_5_moe/gdn.py", 5, "_conv_prefill"),), "GDN", "GDN causal conv (gdn.py:5)"),
        ((("models/qwen3_5_moe/gdn.py", 5, "_gates"),), "GDN", "GDN (gdn.py:5)"),
        ((("models/qwen3_5_moe/attention.py", 5, "forward"),), "attention", "attention (attention.py:5)"),
        ((("kernel/triton/mhc.py", 5, "mix"),), "hyper-connections", "hyper-connections (mhc.py:5)"),
        ((("models/qwen4_exp/model.py", 5, "complete"),), "hidden states", "hidden states (model.py:5)"),
        ((), "other", "forward_batch (engine.py:9)"),
    ],
)
def test_a_stack_has_a_component_and_a_place(
    inner: tuple[tuple[str, int, str], ...], component: str, place: str
) -> None:
    frames = [("/usr/lib/torch/functional.py", 1, "cat")] + [(ROOT + file, line, name) for file, line, name in inner]
    assert place_of([*frames, *BELOW]) == (component, place)


def test_a_stack_outside_of_the_engine_is_nowhere() -> None:
    assert place_of([("/opt/app.py", 1, "main")]) == ("other", "")
    assert place_of([]) == ("other", "")


def test_an_error_that_another_hides_while_it_is_tidied_up_has_the_place_of_the_first() -> None:
    where = ROOT + "kernel/triton/attention.py"
    namespace: dict[str, object] = {}
    exec(compile("def launch():\n    raise RuntimeError('an illegal memory access')", where, "exec"), namespace)

    def tidied_up() -> None:
        try:
            namespace["launch"]()  # type: ignore[operator]
        finally:
            raise RuntimeError("the device answers nothing any more")

    with pytest.raises(RuntimeError, match="nothing any more") as caught:
        tidied_up()
    assert site_of(caught.value) == "attention (attention.py:2)"


def test_an_error_out_of_the_engine_is_placed_where_it_was_raised_whatever_it_followed() -> None:
    source = "def launch():\n    try:\n        return {}['scratch']\n    except KeyError:\n        raise MemoryError\n"
    namespace: dict[str, object] = {}
    exec(compile(source, ROOT + "kernel/triton/attention.py", "exec"), namespace)
    with pytest.raises(MemoryError) as caught:
        namespace["launch"]()  # type: ignore[operator]
    assert site_of(caught.value) == "attention (attention.py:5)"


@pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")
def test_routing_counts_what_the_routers_chose_and_leaves_the_layers_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from freetoken.layers import moe

    from engine_hooks.freetoken import routing

    def entrance(self: object, hidden: object, weights: object, ids: object) -> str:
        return "through"

    monkeypatch.setattr(moe.OffloadMoELayer, "_prefill_routed", entrance)
    layer = SimpleNamespace(num_experts=8)
    with routing.observed() as found:
        for ids in ([[0, 1], [0, 2]], [[5, 5], [5, 5]]):
            through = moe.OffloadMoELayer._prefill_routed(layer, None, None, torch.tensor(ids, dtype=torch.int32))
            assert through == "through"
    assert moe.OffloadMoELayer._prefill_routed is entrance
    (seen,) = found
    assert (seen.experts, seen.distinct, seen.largest_load) == (8, (3, 1), (2, 4))
    with routing.observed() as found:
        pass
    assert found == []
