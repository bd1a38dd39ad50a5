from __future__ import annotations

import dataclasses

import pytest
from memory_engine import MIB, MemoryEngine

from prefill_probe import (
    PrefillFaultError,
    PrefillInconclusiveError,
    PrefillOOMError,
    PrefillTimeoutError,
    ProbeRecord,
    ProbeSettings,
    Shape,
    probe,
)
from prefill_probe.engine import Routing
from prefill_probe.record import FaultEntry, Neighbour, Rank
from prefill_probe.render.text import error_for, log_line

SETTINGS = ProbeSettings(margin_bytes=128 * MIB)


def refused() -> ProbeRecord:
    return probe(MemoryEngine(600 * MIB), SETTINGS)


def test_the_named_error_says_what_how_much_why_and_what_to_type_next() -> None:
    error = error_for(refused())
    assert isinstance(error, PrefillOOMError)
    assert error.exit_status == 78
    assert str(error) == (
        "a full prefill chunk does not fit this GPU.\n"
        "  chunk        8192 tokens (--max-prefill-length 8192)\n"
        "  needs        1.62 GiB   headroom after CUDA graphs 0.59 GiB   short 1.03 GiB\n"
        "  failed in    GDN causal conv (conv.py:1), allocating 160 MiB with 60 MiB free\n"
        "Start again with one of these (each was run on this GPU before it was printed):\n"
        "  --max-prefill-length 2240                       peak 468 MiB, leaves 132 MiB    KV cache unchanged, "
        "prefill 73 % slower\n"
        "  --max-prefill-length 4096 --memory-ratio 0.92   peak 839 MiB, leaves 222 MiB    "
        "KV cache 950000 -> 920000 tokens, prefill 50 % slower\n"
        "  --memory-ratio 0.87                             peak 1658 MiB, leaves 170 MiB   "
        "KV cache 950000 -> 870000 tokens\n"
        "To serve all the same: --prefill-probe warn (prompts are then cut into chunks that fit)"
    )


def test_one_screen_is_enough_in_the_worst_case() -> None:
    record = dataclasses.replace(
        refused(),
        neighbours=[Neighbour(pid, 100 * MIB) for pid in range(50)],
        ranks=[Rank(number, "does-not-fit", 1, 2) for number in range(2)],
        notes=["margin 1024 MiB: on WSL2 not all memory that is reported free can be had"],
    )
    lines = str(error_for(record)).splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 140


def test_where_nothing_fits_no_value_is_made_up() -> None:
    text = str(error_for(probe(MemoryEngine(10 * MIB, floor=0.95), SETTINGS)))
    assert "no chunk came back" in text
    assert "Not even a chunk of 64 tokens" in text
    assert "--max-prefill-length 8192)" in text
    assert "peak about" not in text


def test_a_fault_makes_no_memory_claim() -> None:
    def fail(number: int, shape: Shape) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    error = error_for(probe(MemoryEngine(4096 * MIB, before_run=fail), SETTINGS))
    assert isinstance(error, PrefillFaultError)
    assert error.exit_status == 70
    assert "not for lack of GPU memory" in str(error)
    assert "--memory-ratio" not in str(error)


def test_a_fault_names_the_chunk_that_met_it_and_how_to_learn_more() -> None:
    """Pages from all over a large pool reach what those at its beginning do not."""

    def fail(number: int, shape: Shape) -> None:
        if shape.cached_tokens:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    text = str(error_for(probe(MemoryEngine(4096 * MIB, before_run=fail), SETTINGS)))
    assert "  shape        deepest chunk: after " in text
    assert "CUDA_LAUNCH_BLOCKING=1" in text


def test_a_launch_limit_says_that_a_smaller_chunk_helps_and_a_ratio_does_not() -> None:
    def fail(number: int, shape: Shape) -> None:
        if shape.new_tokens > 8191:
            raise RuntimeError("CUDA error: invalid argument")

    text = str(error_for(probe(MemoryEngine(4096 * MIB, before_run=fail), SETTINGS)))
    assert "A smaller --max-prefill-length avoids it; a --memory-ratio does not." in text


@pytest.mark.parametrize(
    ("verdict", "kind", "error"),
    [
        ("inconclusive", "memory", PrefillInconclusiveError),
        ("fault", "time-out", PrefillTimeoutError),
        ("fault", "unknown", PrefillFaultError),
    ],
)
def test_every_verdict_that_stops_has_its_own_error(verdict: str, kind: str, error: type[Exception]) -> None:
    fault = FaultEntry(kind, False, False, False, "text")
    assert type(error_for(dataclasses.replace(refused(), verdict=verdict, fault=fault))) is error


def test_verdicts_that_serve_have_none_and_say_what_is_left() -> None:
    fits = probe(MemoryEngine(4096 * MIB), SETTINGS)
    tight = probe(MemoryEngine(1700 * MIB), SETTINGS)
    assert error_for(fits) is error_for(tight) is None
    assert "fits: a prefill chunk of 8192 tokens needs 1658 MiB" in log_line(fits)
    assert "(margin 128 MiB)" in log_line(tight)


def test_the_components_that_held_the_memory_are_named() -> None:
    engine = MemoryEngine(600 * MIB, routing=Routing(8, (8,), (9,)))
    assert "  held by      MoE 360 MiB, GDN 180 MiB" in str(error_for(probe(engine, SETTINGS)))


def test_a_packed_chunk_that_fails_says_how_many_prompts_it_holds() -> None:
    engine = MemoryEngine(
        4096 * MIB, sequences=4, state_tokens=64, extra=lambda shape: 3000 * MIB if len(shape.sequences) > 1 else 0
    )
    assert "  shape        packed chunk: 4 prompts" in str(error_for(probe(engine, SETTINGS)))
