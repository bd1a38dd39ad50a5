from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
from memory_engine import AUTOMATIC, MIB, MemoryEngine, MemoryMeter, out_of_memory

from prefill_probe import ProbeSettings, Sequence, Shape, probe
from prefill_probe._verdict import Part
from prefill_probe.engine import Budget, Pool, Routing, ShapeRefused
from prefill_probe.record import ProbeRecord
from prefill_probe.render.text import error_for

MARGIN = ProbeSettings(margin_bytes=128 * MIB)


def need(engine: MemoryEngine, tokens: int) -> int:
    return engine.fixed + tokens * engine.per_token


def test_a_chunk_that_leaves_the_margin_fits() -> None:
    engine = MemoryEngine(headroom=4096 * MIB)
    record = probe(engine, MARGIN)
    assert record.verdict == "fits"
    assert record.need is not None
    assert record.need.device_bytes == need(engine, 8192)
    assert not record.need.estimated
    assert record.advice == []
    assert [(run.new_tokens, run.run, run.outcome) for run in record.shapes] == [
        (8192, "cold", "ok"),  # full
        (8192, "cold", "ok"),  # deepest
        (5120, "warm", "ok"),
        (8192, "warm", "ok"),  # the larger of the two again, with nothing handed back
        (64, "warm", "ok"),
        (8192, "warm", "ok"),  # and once more
    ]
    assert [run.name.endswith("nothing handed back before") for run in record.shapes] == [False] * 3 + [True] * 3


def test_a_chunk_that_fits_but_eats_the_margin_is_tight_and_gets_advice() -> None:
    engine = MemoryEngine(headroom=need(MemoryEngine(0), 8192) + 10 * MIB)
    record = probe(engine, MARGIN)
    assert record.verdict == "tight"
    assert record.advice


def test_the_need_of_each_ledger_is_that_of_the_shape_that_takes_most_of_it() -> None:
    """Blocks of one shape may fit better into pages than those of another, which then has less of one and more of the
    other."""

    class Paged(MemoryMeter):
        @contextlib.contextmanager
        def measure(self, idle: Any) -> Any:
            with super().measure(idle) as measured:
                yield measured
            if len(engine.shapes[-1].sequences) > 1:
                more = measured.peak.allocated_bytes + 16 * MIB
                measured.peak = dataclasses.replace(measured.peak, allocated_bytes=more)

    engine = MemoryEngine(headroom=4096 * MIB, sequences=4, state_tokens=64, extra=lambda shape: shape.cached_tokens)
    engine.meter = Paged(engine)
    record = probe(engine, ProbeSettings(margin_bytes=128 * MIB, shapes=("full", "deep", "packed")))
    assert record.need is not None
    assert record.need.shape == "deepest chunk"
    of = {run.name: run.peak for run in record.shapes}
    assert of["packed chunk"].allocated_bytes > of["deepest chunk"].allocated_bytes
    assert record.need.allocated_bytes == of["packed chunk"].allocated_bytes
    assert record.need.device_bytes == of["deepest chunk"].device_bytes > of["packed chunk"].device_bytes


def test_one_byte_decides_between_fits_and_tight() -> None:
    exact = need(MemoryEngine(0), 8192) + 128 * MIB
    assert probe(MemoryEngine(headroom=exact), MARGIN).verdict == "fits"
    assert probe(MemoryEngine(headroom=exact - 1), MARGIN).verdict == "tight"


def test_a_chunk_that_does_not_fit_is_halved_until_one_does_and_then_tried_again() -> None:
    engine = MemoryEngine(headroom=600 * MIB, refuses_to_resize=True)
    record = probe(engine, MARGIN)
    assert record.verdict == "does-not-fit"
    assert 0 < record.timings["oom_to_advice_seconds"] <= record.timings["probe_seconds"]
    assert [(run.new_tokens, run.outcome) for run in record.shapes] == [
        (8192, "oom"),
        (4096, "oom"),
        (2048, "ok"),
        (2048, "ok"),
        (1024, "ok"),
        (1024, "ok"),
        (8192, "oom"),
        (2240, "ok"),  # advice, run before it is given
        (2496, "ok"),  # and a clear step more, which eats the margin
    ]
    assert record.need is not None
    assert record.need.estimated
    assert record.need.device_bytes >= need(engine, 8192)


def test_scratch_memory_of_a_first_run_is_no_reason_to_refuse() -> None:
    engine = MemoryEngine(headroom=need(MemoryEngine(0), 8192) + 200 * MIB, first_extra=256 * MIB)
    record = probe(engine, MARGIN)
    assert record.shapes[0].outcome == "oom"
    assert record.verdict == "fits"


def test_what_the_first_run_leaves_behind_is_taken_off_the_headroom() -> None:
    engine = MemoryEngine(headroom=2000 * MIB, resident_after_first=50 * MIB)
    record = probe(engine, MARGIN)
    assert record.memory.headroom_bytes == 1950 * MIB
    assert record.memory.warmed_bytes == 50 * MIB
    assert record.memory.free_after_graphs_bytes == 2000 * MIB


def test_the_record_keeps_the_scheduler_s_own_chunk_beside_the_requested_one() -> None:
    cut = MemoryEngine(4096 * MIB, issue=lambda shape: Shape(shape.name, (Sequence(0, min(8128, shape.new_tokens)),)))
    record = probe(cut, MARGIN)
    assert (record.chunk.requested, record.chunk.effective) == (8192, 8128)


@pytest.mark.parametrize(
    ("engine", "effective", "words"),
    [
        (MemoryEngine(4096 * MIB, kv_pages=50), 50 * 64 - 1, "KV pool of 3200 tokens"),
        (MemoryEngine(4096 * MIB, longest=1000), 1000, "sequence limit of 1000"),
    ],
)
def test_a_chunk_larger_than_the_pools_is_cut_and_the_record_says_by_what(
    engine: MemoryEngine, effective: int, words: str
) -> None:
    record = probe(engine, MARGIN)
    assert record.chunk.effective == effective
    assert words in record.chunk.capped_by


def test_an_error_that_is_no_memory_shortage_is_a_fault_and_ends_the_runs() -> None:
    def fail(number: int, shape: Shape) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = MemoryEngine(4096 * MIB, before_run=fail)
    record = probe(engine, MARGIN)
    assert record.verdict == "fault"
    assert record.fault is not None
    assert record.fault.kind == "kernel-fault"
    assert len(engine.shapes) == 1
    assert engine.settled == 0  # the context is dead: nothing more is asked of the device


def test_an_unknown_error_is_never_called_memory() -> None:
    def fail(number: int, shape: Shape) -> None:
        raise KeyError("layers.3")

    record = probe(MemoryEngine(4096 * MIB, before_run=fail), MARGIN)
    assert (record.verdict, record.fault.kind if record.fault else "") == ("fault", "unknown")


def test_a_failed_run_leaves_no_tensor_behind_in_its_traceback() -> None:
    class Tensor:
        alive = 0

        def __init__(self) -> None:
            Tensor.alive += 1

        def __del__(self) -> None:
            Tensor.alive -= 1

    alive_at_start = []

    def fail(number: int, shape: Shape) -> None:
        alive_at_start.append(Tensor.alive)
        held = Tensor()
        if shape.new_tokens > 2048:
            raise out_of_memory(160 * MIB, MIB) from ValueError("first")
        del held

    probe(MemoryEngine(4096 * MIB, before_run=fail), MARGIN)
    assert len(alive_at_start) > 3
    assert set(alive_at_start) == {0}


def test_the_engine_is_settled_once_after_a_pass_after_an_oom_and_after_an_interrupt() -> None:
    def interrupt(number: int, shape: Shape) -> None:
        raise KeyboardInterrupt

    for engine in (MemoryEngine(4096 * MIB), MemoryEngine(600 * MIB)):
        probe(engine, MARGIN)
        assert engine.settled == 1
    engine = MemoryEngine(4096 * MIB, before_run=interrupt)
    with pytest.raises(KeyboardInterrupt):
        probe(engine, MARGIN)
    assert engine.settled == 1


def test_what_was_set_aside_from_the_garbage_collector_is_back_afterwards_and_an_engine_s_own_stays() -> None:
    class Watched(MemoryEngine):
        def resize(self, *args: Any) -> Any:
            aside.append(gc.get_freeze_count())
            return super().resize(*args)

    aside: list[int] = []
    assert probe(Watched(600 * MIB), MARGIN).verdict == "does-not-fit"
    assert min(aside) > 1000
    assert gc.get_freeze_count() == 0
    gc.freeze()
    own = gc.get_freeze_count()
    try:
        probe(MemoryEngine(600 * MIB), MARGIN)
        assert gc.get_freeze_count() == pytest.approx(own, rel=0.01)
    finally:
        gc.unfreeze()


def test_nothing_fits_at_all() -> None:
    record = probe(MemoryEngine(10 * MIB, floor=0.95), MARGIN)
    assert record.verdict == "does-not-fit"
    assert record.need is None
    assert not any(line.was_run for line in record.advice)
    assert record.shapes[-1].new_tokens == 64


def test_explicit_pools_are_named_and_the_ratio_is_not() -> None:
    budget = Budget(0.9, 15360 * MIB, False, True, (Pool("--num-tokens", 1_048_576, 4096, 64),))
    record = probe(MemoryEngine(600 * MIB, budget_=budget), MARGIN)
    flags = {flag for line in record.advice for flag in line.flags}
    assert flags == {"--max-prefill-length", "--num-tokens"}


def test_a_ratio_below_the_planner_s_floor_is_not_offered_but_explained() -> None:
    record = probe(MemoryEngine(600 * MIB, floor=0.94), MARGIN)
    refused = [line for line in record.advice if "--memory-ratio" in line.flags]
    assert [line.peak_bytes for line in refused] == [None]
    assert "cache budget too small" in refused[0].reason


def test_a_record_survives_its_json() -> None:
    for headroom in (4096, 600, 10):
        record = probe(MemoryEngine(headroom * MIB), MARGIN)
        assert ProbeRecord.from_json(record.to_json()) == record


# Neighbours ---------------------------------------------------------------------------------------------------------


def test_a_neighbour_that_moves_once_makes_the_probe_repeat() -> None:
    engine = MemoryEngine(4096 * MIB)
    engine.meter.neighbours_known = True

    def move(number: int, shape: Shape) -> None:
        if number == 2:
            engine.meter.foreign += 500 * MIB

    engine.before_run = move
    record = probe(engine, MARGIN)
    assert record.verdict == "fits"
    assert len(engine.shapes) == 12
    assert record.neighbours is not None
    assert [(each.pid, each.bytes) for each in record.neighbours] == [(4242, 500 * MIB)]


@pytest.mark.parametrize("known", [True, False])
def test_a_neighbour_that_keeps_moving_makes_the_verdict_inconclusive(known: bool) -> None:
    engine = MemoryEngine(8192 * MIB)
    engine.meter.neighbours_known = known

    def move(number: int, shape: Shape) -> None:
        engine.meter.foreign += 40 * MIB

    engine.before_run = move
    record = probe(engine, MARGIN)
    assert record.verdict == "inconclusive"
    assert any("free memory moved by" in note for note in record.notes)


def test_thirty_two_mib_are_no_disturbance() -> None:
    engine = MemoryEngine(8192 * MIB)
    engine.meter.neighbours_known = True

    def move(number: int, shape: Shape) -> None:
        if number == 1:
            engine.meter.foreign += 32 * MIB

    engine.before_run = move
    assert probe(engine, MARGIN).verdict == "fits"
    assert len(engine.shapes) == 6


# Machines on which running out does harm ------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [{"wsl": True}, {"unified": True}])
def test_chunks_grow_and_stop_before_what_is_predicted_not_to_fit(machine: dict[str, bool]) -> None:
    engine = MemoryEngine(1000 * MIB, gpu=machine)
    record = probe(engine, MARGIN)
    sizes = [shape.new_tokens for shape in engine.shapes]
    assert sizes == sorted(sizes)
    assert max(sizes) < 8192
    assert all(run.outcome == "ok" for run in record.shapes)
    assert record.verdict == "does-not-fit"
    assert any("was not run" in note for note in record.notes)


@pytest.mark.parametrize(("machine", "least"), [({"wsl": True}, 1024), ({"unified": True}, 2048), ({}, 128)])
def test_the_margin_is_larger_where_free_memory_is_not_what_it_seems(machine: dict[str, bool], least: int) -> None:
    record = probe(MemoryEngine(8192 * MIB, gpu=machine), ProbeSettings())
    assert record.memory.margin_bytes == least * MIB
    assert bool(record.notes) == bool(machine)


def test_what_only_a_first_run_takes_is_not_multiplied_into_the_prediction() -> None:
    usual = {
        "headroom": 1100 * MIB,
        "per_token": MIB // 10,
        "first_extra": 300 * MIB,
        "resident_after_first": 150 * MIB,
    }
    record = probe(MemoryEngine(**usual, gpu={"wsl": True}), ProbeSettings(margin_bytes=64 * MIB))  # type: ignore[arg-type]
    assert record.verdict == "fits"


def test_a_rank_that_stopped_for_another_s_shortage_makes_it_no_fault() -> None:
    def ranks(value: object) -> list[object]:
        if isinstance(value, tuple):
            return [value, (False, True)]  # the other rank ran out of memory in every run
        if isinstance(value, Part):
            return [value, dataclasses.replace(value, verdict="does-not-fit", need=None)]
        return [value, value]

    engine = MemoryEngine(4096 * MIB, gpu={"wsl": True}, ranks=ranks)
    record = probe(engine, MARGIN)
    assert record.verdict == "does-not-fit"
    assert [rank.verdict for rank in record.ranks] == ["fits", "does-not-fit"]


def test_the_planner_s_failure_costs_the_advice_and_not_the_verdict() -> None:
    engine = MemoryEngine(600 * MIB)
    engine.plan = lambda memory_ratio: {}["broken"]  # type: ignore[method-assign, misc]
    record = probe(engine, MARGIN)
    assert (record.verdict, record.advice) == ("does-not-fit", [])
    assert any("no advice: KeyError" in note for note in record.notes)


def test_a_full_chunk_that_crawls_on_wsl_is_oversubscribed() -> None:
    engine = MemoryEngine(8192 * MIB, gpu={"wsl": True})

    def crawl(number: int, shape: Shape) -> None:
        engine.seconds = 0.1 * shape.new_tokens / 1024 * (4 if shape.new_tokens == 8192 else 1)

    engine.before_run = crawl
    record = probe(engine, MARGIN)
    assert record.verdict == "tight"
    assert any("oversubscribed" in note for note in record.notes)


# The worst shape ----------------------------------------------------------------------------------------------------


def only(name: str, extra: int) -> Callable[[Shape], int]:
    return lambda shape: extra if shape.name.startswith(name) else 0


@pytest.mark.parametrize("name", ["deepest chunk", "packed chunk"])
def test_the_need_is_that_of_the_worst_shape_and_the_record_names_it(name: str) -> None:
    engine = MemoryEngine(4096 * MIB, sequences=4, state_tokens=64, extra=only(name, 300 * MIB))
    record = probe(engine, MARGIN)
    assert record.verdict == "fits"
    assert record.need is not None
    assert (record.need.shape, record.need.device_bytes) == (name, need(engine, 8192) + 300 * MIB)
    assert [run.name for run in record.shapes][-1].startswith(name)


@pytest.mark.parametrize("name", ["deepest chunk", "packed chunk"])
def test_a_shape_that_does_not_fit_stops_the_start_even_if_the_full_chunk_fits(name: str) -> None:
    engine = MemoryEngine(4096 * MIB, sequences=4, state_tokens=64, extra=only(name, 3000 * MIB))
    record = probe(engine, MARGIN)
    assert record.verdict == "does-not-fit"
    assert record.need is not None
    # It came back once the pools were smaller.
    assert (record.need.shape, record.need.estimated) == (name, False)
    assert record.need.device_bytes == need(engine, 8192) + 3000 * MIB
    for line in record.advice:
        tokens = line.flags.get("--max-prefill-length")
        assert tokens is None or need(engine, int(tokens)) + 3000 * MIB + 128 * MIB <= 4096 * MIB
    assert name in str(error_for(record))


def test_a_tight_worst_shape_is_kept_at_every_size_that_is_advised() -> None:
    extra = 2000 * MIB
    engine = MemoryEngine(need(MemoryEngine(0), 8192) + extra + 10 * MIB, extra=only("deepest", extra))
    record = probe(engine, MARGIN)
    assert record.verdict == "tight"
    chunks = [int(line.flags["--max-prefill-length"]) for line in record.advice if "--max-prefill-length" in line.flags]
    assert chunks
    assert all(need(engine, tokens) + extra + 128 * MIB <= engine.headroom for tokens in chunks)


def test_one_run_of_the_worst_shape_says_what_its_peak_is_made_of_and_what_the_routers_chose() -> None:
    engine = MemoryEngine(4096 * MIB, routing=Routing(8, (8, 3), (100, 4096)))
    record = probe(engine, MARGIN)
    (run,) = [run for run in record.shapes if run.made_of]
    assert run is record.shapes[-1]
    assert engine.traces == 1
    assert run.made_of is not None
    assert sum(run.made_of.components.values()) == run.peak.allocated_bytes
    assert list(run.made_of.components) == ["MoE", "GDN"]
    assert run.made_of.largest_site == "MoE (model.py:7)"
    assert run.routing is not None
    assert (run.routing.experts, run.routing.distinct, run.routing.largest_load) == (8, [8, 3], [100, 4096])
    assert ProbeRecord.from_json(record.to_json()) == record


def test_that_run_also_says_what_was_live_in_which_layer() -> None:
    record = probe(MemoryEngine(4096 * MIB, routing=Routing(8, (8,), (9,))), MARGIN)
    (run,) = [run for run in record.shapes if run.timeline]
    assert run.timeline is not None
    assert run.made_of is not None
    assert run.timeline.layers == [0, 1]
    gdn, moe = run.made_of.components["GDN"], run.made_of.components["MoE"]
    assert run.timeline.components == {"MoE": [0, moe], "GDN": [gdn, gdn]}


def test_the_record_says_where_memory_is_that_was_free_before_loading() -> None:
    held = {"weights": 9000, "expert_cache": 2000, "kv_pool": 1500, "state_pool": 80, "graphs": 20}
    engine = MemoryEngine(2048 * MIB, held={name: size * MIB for name, size in held.items()})
    record = probe(engine, MARGIN)
    assert record.memory.held is not None
    assert record.memory.held.kv_pool_bytes == 1500 * MIB
    # 15360 were free before loading, 12600 are accounted for, 2048 are free.
    assert record.memory.held.other_bytes == 712 * MIB
    assert ProbeRecord.from_json(record.to_json()) == record


def test_an_engine_that_cannot_say_what_it_holds_is_probed_all_the_same() -> None:
    record = probe(MemoryEngine(4096 * MIB, held_fails=True), MARGIN)
    assert (record.verdict, record.memory.held) == ("fits", None)
    assert any("a pool of a kind that is not known" in note for note in record.notes)


def test_an_oom_says_what_held_the_memory_when_it_failed() -> None:
    record = probe(MemoryEngine(600 * MIB, routing=Routing(8, (8,), (9,))), MARGIN)
    (run,) = [run for run in record.shapes if run.made_of]
    assert (run.new_tokens, run.outcome) == (8192, "oom")


def test_only_the_shapes_that_were_named_are_run() -> None:
    engine = MemoryEngine(4096 * MIB, sequences=4, state_tokens=64)
    names = {run.name.partition(",")[0] for run in probe(engine, ProbeSettings(shapes=("full", "packed"))).shapes}
    assert names == {"full chunk", "packed chunk", "5120 tokens", "64 tokens"}


def test_a_shape_that_the_scheduler_does_not_admit_is_noted_and_is_no_fault() -> None:
    def refuse(number: int, shape: Shape) -> None:
        if shape.name == "deepest chunk":
            raise ShapeRefused("the scheduler admits only 64 of 4096 cached tokens")

    record = probe(MemoryEngine(4096 * MIB, before_run=refuse), MARGIN)
    assert record.verdict == "fits"
    assert record.notes == ["deepest chunk not run: the scheduler admits only 64 of 4096 cached tokens"]
    assert record.need is not None
    assert record.need.shape == "full chunk"


def test_shapes_that_the_limits_rule_out_are_not_run() -> None:
    engine = MemoryEngine(4096 * MIB, chunk=1000, longest=1000)
    assert {run.name.partition(",")[0] for run in probe(engine, MARGIN).shapes} == {
        "full chunk",
        "576 tokens",
        "64 tokens",
    }


def test_reserved_memory_that_keeps_growing_is_reported_and_counted() -> None:
    engine = MemoryEngine(4096 * MIB, fragments_each_run=40 * MIB)
    record = probe(engine, MARGIN)
    assert any("fragmentation" in note for note in record.notes)
    assert record.need is not None
    assert record.need.reserved_bytes >= need(engine, 8192) + 200 * MIB
    assert not any("fragmentation" in note for note in probe(MemoryEngine(4096 * MIB), MARGIN).notes)


def test_what_only_a_first_run_took_is_not_in_the_need() -> None:
    engine = MemoryEngine(4096 * MIB, first_extra=256 * MIB, chunk=1000, longest=1000)
    record = probe(engine, MARGIN)
    assert record.need is not None
    assert record.need.allocated_bytes == need(engine, 1000)


# Advice that was run ------------------------------------------------------------------------------------------------


def test_what_is_recommended_was_run_with_the_worst_shape_and_left_the_margin() -> None:
    engine = MemoryEngine(600 * MIB)
    record = probe(engine, MARGIN)
    assert [list(line.flags) for line in record.advice] == [
        ["--max-prefill-length"],
        ["--max-prefill-length", "--memory-ratio"],
        ["--memory-ratio"],
    ]
    assert all(line.was_run for line in record.advice)
    ran = {(run.new_tokens, run.peak.device_bytes) for run in record.shapes if run.outcome == "ok"}
    for line in record.advice:
        assert line.leaves_bytes is not None
        assert line.leaves_bytes >= 128 * MIB
        assert (line.flags.get("--max-prefill-length", 8192), line.peak_bytes) in ran
    assert all(run.advised for run in record.shapes[record.shapes.index(record.judged[-1]) + 1 :])
    assert not any(run.outcome == "ok" and run.new_tokens == 8192 for run in record.judged)
    # The pools have the sizes of the start again.
    assert engine.resized[-1] == {}
    assert engine.headroom == 600 * MIB
    # The full chunk came back with smaller pools, so its need is known.
    assert record.need is not None
    assert (record.need.estimated, record.need.device_bytes) == (False, need(engine, 8192))


def test_each_line_says_what_it_costs() -> None:
    record = probe(MemoryEngine(600 * MIB), MARGIN)
    chunk, pair, ratio = record.advice
    assert chunk.cost.startswith("KV cache unchanged, prefill ")
    assert pair.cost.startswith("KV cache 950000 -> ")
    assert "slower" in pair.cost
    assert ratio.cost == "KV cache 950000 -> 870000 tokens"


@pytest.mark.parametrize("headroom", [500, 550, 600, 650])
def test_speed_and_peak_of_advice_are_not_those_of_a_size_s_very_first_run(headroom: int) -> None:
    """The full chunk comes back for the first time with smaller pools, and compiles its kernels there."""
    engine = MemoryEngine(headroom * MIB)
    seen: set[int] = set()

    def compiling(number: int, shape: Shape) -> None:
        comes_back = need(engine, shape.new_tokens) <= engine.headroom
        engine.seconds = 9.0 if shape.new_tokens == 8192 and not seen else 0.25
        seen.update([8192] if shape.new_tokens == 8192 and comes_back else [])

    engine.before_run = compiling
    chunk, *_, ratio = probe(engine, MARGIN).advice
    slower = round(100 * (1 - chunk.flags["--max-prefill-length"] / 8192))
    assert chunk.cost == f"KV cache unchanged, prefill {slower} % slower"
    assert ratio.peak_bytes == need(engine, 8192)


def test_where_seconds_are_not_the_device_s_no_speed_is_claimed() -> None:
    engine = MemoryEngine(600 * MIB)
    engine.meter.timed = False
    assert not any("prefill" in line.cost for line in probe(engine, MARGIN).advice)


def test_where_the_engine_overwrites_the_chunk_it_is_never_advised() -> None:
    budget = dataclasses.replace(AUTOMATIC, chunk_governs=False)
    assert [list(line.flags) for line in probe(MemoryEngine(600 * MIB, budget_=budget), MARGIN).advice] == [
        ["--memory-ratio"]
    ]


def test_an_explicit_pool_is_resized_and_run_before_its_size_is_advised() -> None:
    budget = Budget(0.9, 15360 * MIB, False, True, (Pool("--num-tokens", 1_048_576, 4096, 64),))
    engine = MemoryEngine(600 * MIB, budget_=budget)
    lines = {tuple(line.flags): line for line in probe(engine, MARGIN).advice}
    line = lines["--num-tokens",]
    assert line.was_run
    value = line.flags["--num-tokens"]
    assert value % 64 == 0
    assert {"--num-tokens": value} in engine.resized
    assert 600 * MIB + (1_048_576 - value) * 4096 - need(engine, 8192) == line.leaves_bytes


def test_flags_that_reduce_the_need_are_named_as_not_run() -> None:
    budget = dataclasses.replace(AUTOMATIC, others=(("--embed-weights host", "looked up in host memory"),))
    text = str(error_for(probe(MemoryEngine(600 * MIB, budget_=budget), MARGIN)))
    assert "Also possible, not run: --embed-weights host (looked up in host memory)" in text


def test_an_engine_that_cannot_resize_gets_its_ratio_as_not_run_with_the_reason() -> None:
    record = probe(MemoryEngine(600 * MIB, refuses_to_resize=True), MARGIN)
    chunk, ratio = record.advice
    assert (chunk.was_run, ratio.was_run) == (True, False)
    assert "Not run: --memory-ratio 0.8" in str(error_for(record))
    assert "the pools cannot be resized" in str(error_for(record))


def test_where_not_even_the_smallest_chunk_comes_back_a_ratio_is_found_all_the_same() -> None:
    record = probe(MemoryEngine(10 * MIB), MARGIN)
    ran = [line for line in record.advice if line.was_run]
    assert ran
    assert all("--memory-ratio" in line.flags and (line.leaves_bytes or 0) >= 128 * MIB for line in ran)


def test_a_fault_during_a_trial_keeps_the_verdict_and_what_was_proven() -> None:
    def fail(number: int, shape: Shape) -> None:
        if engine.headroom > 600 * MIB:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = MemoryEngine(600 * MIB, before_run=fail)
    record = probe(engine, MARGIN)
    assert record.verdict == "does-not-fit"
    assert [list(line.flags) for line in record.advice if line.was_run] == [["--max-prefill-length"]]
    assert any("illegal memory access" in line.reason for line in record.advice)


def test_a_tight_start_goes_on_and_its_advice_is_calculated() -> None:
    engine = MemoryEngine(headroom=need(MemoryEngine(0), 8192) + 10 * MIB)
    record = probe(engine, MARGIN)
    assert record.advice
    assert not any(line.was_run for line in record.advice)
    assert engine.resized == []
