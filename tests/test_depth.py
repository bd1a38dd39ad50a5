"""One record of two halves."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from memory_engine import MIB, MemoryEngine

from prefill_probe import ProbeRecord, ProbeSettings, probe
from prefill_probe.advice import need_at
from prefill_probe.depth import at_full_depth, points
from prefill_probe.record import Held
from prefill_probe.render.screen import screen

# Its need is more than 1600 MiB, and it has ample headroom.
RUN = probe(MemoryEngine(9000 * MIB), ProbeSettings(margin_bytes=20_000 * MIB))
assert RUN.need is not None
NEED = RUN.need.device_bytes


def planned(free: int, before: int | None = None, **flags: Any) -> ProbeRecord:
    """A plan that leaves ``free`` bytes after graph capture."""
    before = RUN.memory.free_before_load_bytes if before is None else before
    held = Held(weights_bytes=7 * MIB, other_bytes=1)
    memory = replace(RUN.memory, free_before_load_bytes=before, free_after_graphs_bytes=free, held=held)
    return replace(
        RUN, memory=memory, model=RUN.model | {"layers": 48}, flags=flags, shapes=[], need=None, notes=["plan"]
    )


def combined(plan: ProbeRecord, run: ProbeRecord = RUN, margin: int | None = 128, *, ratio: bool = True) -> ProbeRecord:
    settings = ProbeSettings(margin_bytes=None if margin is None else margin * MIB)
    return at_full_depth(run, plan, 4, settings, ratio_governs=ratio)


@pytest.mark.parametrize(
    ("left", "verdict"), [(129, "fits"), (128, "fits"), (127, "tight"), (0, "tight"), (-1, "does-not-fit")]
)
def test_the_verdict_is_the_plan_s_headroom_against_the_need_that_was_run(left: int, verdict: str) -> None:
    record = combined(planned(NEED + left * MIB + RUN.memory.warmed_bytes))
    assert (record.verdict, record.need) == (verdict, RUN.need)
    assert record.memory.headroom_bytes - NEED == left * MIB
    assert record.ranks[0].verdict == verdict


def test_what_was_not_measured_is_named_and_the_record_keeps_the_schema() -> None:
    record = combined(planned(NEED))
    assert record.reduced is not None
    assert (record.reduced.layers, record.reduced.of, record.model["layers"]) == (4, 48, 48)
    assert "memory.headroom_bytes" in record.reduced.estimated
    assert any("first 4 of 48 layers" in note for note in record.notes)
    schema = json.loads(files("prefill_probe").joinpath("record.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(record.to_json()), schema)
    assert ProbeRecord.from_json(record.to_json()) == record
    text = screen(record)
    assert "4 of 48 layers" in text
    assert "after CUDA graphs, estimated" in text


def test_a_context_that_takes_more_than_the_virtual_one_leaves_less_by_the_share_that_pools_do_not_have() -> None:
    before = RUN.memory.free_before_load_bytes + 100 * MIB
    by_ratio = combined(planned(900 * MIB, before, **{"--memory-ratio": 0.75}))
    by_size = combined(planned(900 * MIB, before, **{"--memory-ratio": 0.75}), ratio=False)
    assert by_ratio.memory.headroom_bytes == 875 * MIB - RUN.memory.warmed_bytes
    assert by_size.memory.headroom_bytes == 800 * MIB - RUN.memory.warmed_bytes


def test_first_layers_that_run_out_of_memory_do_not_fit_whatever_the_plan_says() -> None:
    run = probe(MemoryEngine(600 * MIB), ProbeSettings())
    assert run.verdict == "does-not-fit"
    record = combined(planned(9000 * MIB), run)
    assert record.verdict == "does-not-fit"
    assert not any(each.advised for each in record.shapes)


@pytest.mark.parametrize("verdict", ["fault", "inconclusive"])
def test_a_run_without_a_measurement_is_what_it_is(verdict: str) -> None:
    assert combined(planned(9000 * MIB), replace(RUN, verdict=verdict)).verdict == verdict


def test_the_margin_is_what_the_machine_asks_for() -> None:
    record = combined(planned(NEED + 500 * MIB), replace(RUN, gpu=RUN.gpu | {"wsl": True}), None)
    assert (record.verdict, record.memory.margin_bytes) == ("tight", 1024 * MIB)
    assert any("WSL2" in note for note in record.notes)


def test_points_have_several_sizes_and_lead_to_the_need() -> None:
    known = points(RUN)
    assert len(known) > 1
    assert need_at(known, RUN.chunk.effective) == NEED


def test_the_evidence_on_a_virtual_gpu_covers_both_geometries_within_one_percent() -> None:
    file = Path(__file__).parents[1] / "docs" / "evidence" / "depth-virtual.json"
    cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
    assert {name.split(",")[0] for name in cases} == {"flash-next-nvfp4", "qwen36-35b-a3b-nvfp4"}
    for case in cases.values():
        assert (case["first"]["layers"], case["ok"]) == (4, True)
        assert case["all"]["layers"] in (40, 48)
        first, all_ = case["first"]["need"], case["all"]["need"]
        assert first["allocated_bytes"] == pytest.approx(all_["allocated_bytes"], rel=0.01)
        # A page of the allocator's large pool, more or less.
        assert first["device_bytes"] == pytest.approx(all_["device_bytes"], rel=0.01, abs=20 * MIB)
