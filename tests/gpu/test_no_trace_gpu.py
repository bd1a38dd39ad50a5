"""On a machine with a CUDA GPU and FreeToken: the engine is as before a probe, whatever became of it."""

from __future__ import annotations

import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_digest import differing, digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment"),
]
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

CHUNK = 2048


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """An offline engine whose own probe was put off, and the hook's view of it."""
    import torch
    from generate import build, tame

    from engine_hooks.freetoken import boot
    from engine_hooks.freetoken.engine import FreeTokenEngine
    from prefill_probe.geometry import make_model

    model = make_model(tmp_path_factory.mktemp("model"), "flash-next-nvfp4", layers=4)
    put_off: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFILL_PROBE", "warn")
        patch.setattr(boot, "_probe", lambda scheduler, noted, peaks, settings: put_off.extend((noted, peaks)))
        llm = build(str(model), CHUNK, max_running_req=4, cuda_graph_max_bs=4, memory_ratio=0.5)
    with torch.inference_mode():
        tame(llm)
    return llm, FreeTokenEngine(llm, *put_off)


def settled(llm: Any, engine: Any) -> dict[str, Any]:
    """The digest once everything that is loaded only once is loaded."""
    from prefill_probe import ProbeSettings, probe

    probe(engine, ProbeSettings(shapes=("full", "first", "deep", "packed", "prefix", "decode")))
    return digest(llm)


def test_a_probe_of_every_shape_leaves_no_trace(booted: tuple[Any, Any]) -> None:
    from prefill_probe import ProbeSettings, probe

    llm, engine = booted
    before = settled(llm, engine)
    record = probe(engine, ProbeSettings(shapes=("full", "first", "deep", "packed", "prefix", "decode")))
    assert record.verdict == "fits", record.notes
    assert not any("not run" in note for note in record.notes), record.notes
    assert differing(before, digest(llm)) == []


def test_an_oom_at_any_of_ten_places_leaves_no_trace(booted: tuple[Any, Any]) -> None:
    """The process is given ever more memory over idle, so that the chunk fails ever later."""
    import torch

    from prefill_probe.shape import deepest_chunk

    llm, engine = booted
    before = settled(llm, engine)
    shape = deepest_chunk(engine.limits(), CHUNK, "deepest chunk")
    assert shape is not None
    total = torch.cuda.get_device_properties(0).total_memory
    places = set()
    for step in range(1, 40):
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + step * (8 << 20)
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            engine.run(shape)
        except torch.OutOfMemoryError as error:
            places.add(engine.site(error))
            del error
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert differing(before, digest(llm)) == [], (step, places)
        if len(places) >= 10:
            break
    assert len(places) >= 5, places


def test_perturbed_routers_spread_a_chunk_and_are_restored_bit_for_bit(booted: tuple[Any, Any]) -> None:
    import torch

    from engine_hooks.freetoken.routers import routers_of
    from prefill_probe import ProbeSettings, probe

    llm, engine = booted
    weights = [router.weight for router in routers_of(llm.engine.model)]
    before = [weight.cpu() for weight in weights]
    with engine.perturbed_routers() as perturbed:
        record = probe(engine, ProbeSettings())
    assert perturbed.routers == len(weights) == 4
    assert all(torch.equal(weight.cpu(), then) for weight, then in zip(weights, before, strict=True))
    assert not engine.damaged
    watched = next(run.routing for run in record.shapes if run.routing)
    assert min(watched.distinct) > 400  # of 512, 10 a token


def test_greedy_tokens_of_twenty_prompts_are_the_same_before_and_after(booted: tuple[Any, Any]) -> None:
    import torch
    from freetoken.core import SamplingParams

    from prefill_probe import ProbeSettings, probe

    llm, engine = booted
    pick = random.Random(3)
    rows = [[pick.randrange(2, 32000) for _ in range(16 + 211 * number)] for number in range(20)]
    for number in range(5, 20, 5):
        rows[number][: len(rows[number - 1])] = rows[number - 1][: len(rows[number])]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens() -> list[list[int]]:
        llm.cache_manager.rebuild(llm.engine.num_pages, llm.engine.page_table)
        with torch.inference_mode():
            return [llm.generate([row], sampling)[0]["token_ids"] for row in rows]

    first = tokens()
    again = tokens()
    llm.cache_manager.rebuild(llm.engine.num_pages, llm.engine.page_table)
    fresh = type(engine)(llm, engine._planner._noted)
    probe(fresh, ProbeSettings())
    assert again == first
    assert tokens() == first
    assert len({token for row in first for token in row}) > 20
