"""On a machine with a CUDA GPU: the reference engine's kernels are right, a probe of it leaves no trace, and the
virtual GPU predicts what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

# bf16 keeps 8 bits: single roundings are 0.2 %, and a result has seen a few of them.
BF16_ERROR = 1e-2
CHUNK = 4096
FLAGS = {"memory_ratio": 0.5, "max_prefill_length": CHUNK, "max_running_requests": 4}


def bf16(*shape: int, seed: int, scale: float = 1.0) -> Any:
    import torch

    chance = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=chance, device="cuda") * scale).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "hidden", "inner"),
    [
        (1, 512, 8, 2048, 512),
        (7, 64, 10, 2560, 640),
        (300, 64, 8, 2048, 512),
        (1000, 32, 10, 2560, 640),
        (4096, 64, 8, 2048, 512),
        (515, 4, 2, 1000, 300),
    ],
)
def test_moe_is_the_loop_over_experts(tokens: int, experts: int, choices: int, hidden: int, inner: int) -> None:
    from exact import experts_one_by_one, relative_error

    from prefill_probe.reference.moe import experts_product, route

    x = bf16(tokens, hidden, seed=1)
    gate_up = bf16(experts, 2 * inner, hidden, seed=2, scale=hidden**-0.5)
    down = bf16(experts, hidden, inner, seed=3, scale=inner**-0.5)
    weights, ids = route(bf16(tokens, experts, seed=4), choices)
    found = experts_product(x, gate_up, down, weights, ids)
    assert relative_error(found, experts_one_by_one(x, gate_up, down, weights, ids)) < BF16_ERROR


def gdn_inputs(tokens: int, key_heads: int, value_heads: int, size: int) -> tuple[Any, ...]:
    import torch

    q, k = bf16(1, tokens, key_heads, size, seed=1), bf16(1, tokens, key_heads, size, seed=2)
    v = bf16(1, tokens, value_heads, size, seed=3)
    decay = -torch.nn.functional.softplus(bf16(1, tokens, value_heads, seed=4).float())
    return q, k, v, decay, bf16(1, tokens, value_heads, seed=5).sigmoid()


@pytest.mark.parametrize("lengths", [[640], [1, 63, 64, 65, 200]])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(16, 48), (16, 32)])
def test_the_chunked_delta_rule_is_the_recurrence(lengths: list[int], key_heads: int, value_heads: int) -> None:
    import torch
    from exact import delta_rule, relative_error
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, decay, beta = gdn_inputs(sum(lengths), key_heads, value_heads, 128)
    state = bf16(len(lengths), value_heads, 128, 128, seed=6, scale=0.1).float()
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    found, end = chunk_gated_delta_rule(
        q, k, v, g=decay, beta=beta,
        initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds,
    )  # fmt: skip
    group = value_heads // key_heads
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    start = 0
    for number, length in enumerate(lengths):
        part = slice(start, start + length)
        exact, exact_end = delta_rule(*(each[0, part] for each in (q, k, v, decay, beta)), state[number])
        assert relative_error(found[0, part], exact) < BF16_ERROR
        assert relative_error(end[number], exact_end) < BF16_ERROR
        start += length


def test_the_recurrent_delta_rule_is_the_recurrence() -> None:
    from exact import delta_rule, relative_error
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, decay, beta = (each.transpose(0, 1) for each in gdn_inputs(3, 16, 48, 128))
    state = bf16(3, 48, 128, 128, seed=6, scale=0.1).float()
    found, end = fused_recurrent_gated_delta_rule(
        q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    q, k = q.repeat_interleave(3, 2), k.repeat_interleave(3, 2)
    for number in range(3):
        exact, exact_end = delta_rule(*(each[number] for each in (q, k, v, decay, beta)), state[number])
        assert relative_error(found[number], exact) < BF16_ERROR
        assert relative_error(end[number], exact_end) < BF16_ERROR


@pytest.mark.parametrize("cached", [0, 100, 40_000])
def test_a_chunk_attends_to_all_tokens_before_it(cached: int) -> None:
    import torch
    from exact import causal, relative_error

    from prefill_probe.reference.attention import attend

    rows = torch.randperm(cached + 64, generator=torch.Generator().manual_seed(cached))[:cached].cuda()
    keys, values = bf16(2, cached + 64, 2, 256, seed=1)
    q, k, v = bf16(130, 24, 256, seed=2), bf16(130, 2, 256, seed=3), bf16(130, 2, 256, seed=4)
    found = attend(q, k, v, keys, values, rows)
    exact = causal(q, torch.cat([keys[rows], k]), torch.cat([values[rows], v]))
    assert relative_error(found, exact) < BF16_ERROR


def test_a_decode_step_attends_to_all_pages() -> None:
    import torch
    from exact import attention_of_one, relative_error

    from prefill_probe.reference.attention import attend_one
    from prefill_probe.reference.pools import PAGE_TOKENS

    keys, values = bf16(2, 64 * PAGE_TOKENS, 2, 256, seed=1)
    table = torch.randperm(63, generator=torch.Generator().manual_seed(1))[:60].view(3, 20).int().cuda() + 1
    lengths = torch.tensor([1, 65, 20 * PAGE_TOKENS], device="cuda")
    q = bf16(3, 24, 256, seed=2)
    found = attend_one(q, keys, values, table, lengths)
    assert relative_error(found, attention_of_one(q, keys, values, table, lengths, PAGE_TOKENS)) < BF16_ERROR


@pytest.fixture(scope="module")
def engine() -> Any:
    from prefill_probe.reference import booted_reference

    return booted_reference(**FLAGS)


def left(engine: Any) -> dict[str, Any]:
    """What a run could leave behind."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {
        "pages": list(engine._kv.free),
        "slots": list(engine._states.free),
        # Slot 0 belongs to no request: rows of a captured decode step that no request uses write there.
        "state": [float(each[:, 1:].abs().max()) for each in (engine._states.conv, engine._states.recurrent)],
        "rng": [torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist()],
        "allocated": torch.cuda.memory_allocated(),
    }


# The kernels' library keeps a few small index tensors of its last calls.
INDEX_BYTES = 64 * 1024


def test_a_probe_of_every_shape_fits_and_leaves_no_trace(engine: Any) -> None:
    from prefill_probe import ProbeSettings, probe

    shapes = ("full", "first", "deep", "packed", "prefix", "decode")
    probe(engine, ProbeSettings(shapes=shapes))
    before = left(engine)
    record = probe(engine, ProbeSettings(shapes=shapes))
    after = left(engine)
    assert record.verdict == "fits", record.notes
    assert {run.outcome for run in record.shapes} == {"ok"}
    assert not any("not run" in note for note in record.notes)
    assert abs(after.pop("allocated") - before.pop("allocated")) < INDEX_BYTES
    assert after == before
    watched = next(run for run in record.shapes if run.routing)
    assert min(watched.routing.distinct) > 400  # of 512: random routers spread a chunk over nearly all
    assert {"gdn", "moe"} & set(watched.made_of.components)


def test_an_oom_is_named_and_leaves_no_trace(engine: Any) -> None:
    import torch

    from prefill_probe.shape import full_chunk

    shape = full_chunk(engine.limits())
    engine.run(shape)
    before = left(engine)
    total = torch.cuda.get_device_properties(0).total_memory
    sites = set()
    for step in range(1, 12):
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + step * (48 << 20)
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            engine.run(shape)
        except torch.OutOfMemoryError as error:
            sites.add(engine.site(error).split()[0])
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        after = left(engine)
        assert abs(after["allocated"] - before["allocated"]) < INDEX_BYTES
        assert {**after, "allocated": 0} == {**before, "allocated": 0}
    assert sites & {"gdn", "moe"}, sites


def test_the_virtual_gpu_predicts_the_allocator_peaks_within_one_percent(engine: Any) -> None:
    import torch

    from prefill_probe import ProbeSettings, probe

    record = probe(engine, ProbeSettings())
    measured = {(run.name, run.run): run.peak.allocated_bytes for run in record.shapes}
    properties = torch.cuda.get_device_properties(0)
    program = f"""
import dataclasses, json
from prefill_probe import ProbeSettings
from prefill_probe.reference import estimate_reference
from prefill_probe.virtual.cards import card_of
card = dataclasses.replace(
    card_of({properties.total_memory}, ({properties.major}, {properties.minor})),
    multiprocessors={properties.multi_processor_count}, shared_bytes={properties.shared_memory_per_block_optin})
record = estimate_reference(card, ProbeSettings(), **{FLAGS!r})
print(json.dumps({{run.name: run.peak.allocated_bytes for run in record.shapes}}))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    predicted = json.loads(done.stdout.splitlines()[-1])
    errors = {
        name: predicted[name] / (measured.get((name, "warm")) or measured[name, "cold"]) - 1
        for name in ("full chunk", "deepest chunk", "packed chunk")
    }
    print({name: f"{error:+.4%}" for name, error in errors.items()})
    assert all(abs(error) < 0.01 for error in errors.values()), errors


def test_a_chunk_in_two_parts_gives_the_scores_of_one(engine: Any) -> None:
    """State, pages and positions are carried over: the same tokens at once, and as a chunk and another after it."""
    import torch
    from exact import relative_error

    from prefill_probe.reference.engine import _Request

    pages, slots = list(engine._kv.free), list(engine._states.free)
    tokens, cut = 640, 448
    whole = _Request(0, tokens, engine._kv.free[-11:], engine._states.free[-1])
    with torch.inference_mode():
        batch = engine._batch([whole], final=True)
        scores = engine._model.prefill(batch, engine._kv, engine._states)
        other = _Request(0, cut, engine._kv.free[-22:-11], engine._states.free[-2])
        engine._model.prefill(engine._batch([other], final=False), engine._kv, engine._states)
        later = engine._batch([_Request(cut, tokens - cut, other.pages, other.slot)], final=True)
        later.ids.copy_(batch.ids[cut:])
        again = engine._model.prefill(later, engine._kv, engine._states)
        for slot in (whole.slot, other.slot):
            engine._states.clear(slot)
    assert engine._kv.free == pages
    assert engine._states.free == slots
    # Four layers of roundings, and experts that are chosen by a hair.
    assert relative_error(again, scores) < 0.1
