"""Records as text: one screen of one, a table of many."""

from __future__ import annotations

import dataclasses
import re

import click
import pytest
from render.records import ALL, FAULT, REFUSED, TIGHT, WHOLE

from prefill_probe.render.screen import screen
from prefill_probe.render.table import table


def plain(text: str) -> str:
    return click.unstyle(text)


def test_the_screen_of_a_measured_record() -> None:
    assert plain(screen(WHOLE)) == (
        "tight   a full prefill chunk fits this GPU, but leaves less than the margin.\n"
        "\n"
        "  chunk        2048 tokens (--max-prefill-length 2048)\n"
        "  need            424 MiB   run, full chunk\n"
        "  headroom        516 MiB   after CUDA graphs\n"
        "  leaves           92 MiB\n"
        "  margin          128 MiB   to be left\n"
        "  held by      GDN 300 MiB, MoE 120 MiB\n"
        "  idle         weights 2.93 GiB, expert cache 1.37 GiB, KV pool 9.57 GiB, state pool 84 MiB, graphs 87 MiB,\n"
        "               other 242 MiB\n"
        "  also on it   process 560 holds 127274 MiB\n"
        "  probed       model on NVIDIA H200 of 139.80 GiB, freetoken 0.1.3\n"
        "               2026-12-02T05:47:16+00:00, in 0.9 s\n"
        "\n"
        "  shape                     tokens   after   run     outcome      peak  seconds\n"
        "  full chunk                  2048       0   warm    ok        424 MiB     0.21\n"
        "  1024 tokens                 1024       0   warm    ok        348 MiB     0.18\n"
        "  (2 more of 4 runs with --json)\n"
        "\n"
        "Start again with one of these (not run; calculated from 1024 tokens: 348 MiB, 2048 tokens: 424 MiB):\n"
        "  --max-prefill-length 1536   peak about 387 MiB, leaves about 129 MiB\n"
        "  --memory-ratio 0.94         peak about 426 MiB, leaves about 242 MiB   KV cache 4915840 -> 4840000 tokens"
    )


def test_the_verdict_and_the_named_error_come_first() -> None:
    lines = plain(screen(REFUSED)).splitlines()
    assert lines[0] == "does-not-fit   PrefillOOMError: a full prefill chunk does not fit this GPU."
    assert "  need           1696 MiB   calculated, full chunk" in lines
    assert "  short          1184 MiB" in lines
    assert "  failed in    hyper-connections (hc.py:182), allocating 40 MiB with 32 MiB free" in lines
    assert plain(screen(FAULT)).startswith(
        "fault   PrefillTimeoutError: a full prefill chunk did not come back in time."
    )
    assert "  fault        time-out: no result within 300 s" in plain(screen(FAULT))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [60, 110])
def test_a_screen_is_enough(name: str, width: int) -> None:
    note = "a note of many words, with a line\nbreak in it; " * 4
    record = dataclasses.replace(ALL[name], shapes=ALL[name].shapes * 9, notes=[note])
    lines = plain(screen(record, width)).splitlines()
    assert len(lines) <= 42
    assert max(len(line) for line in lines if line.startswith(("note", "  held", "  idle", "      "))) <= width


def test_runs_over_the_leavings_of_others_are_no_rows_of_their_own() -> None:
    kept = dataclasses.replace(TIGHT.shapes[1], name="64 tokens, nothing handed back before", new_tokens=64)
    text = plain(screen(dataclasses.replace(TIGHT, shapes=[*TIGHT.shapes, kept])))
    assert "64 tokens" not in text
    assert "(3 more of 5 runs with --json)" in text


def test_only_the_verdict_is_coloured() -> None:
    assert re.findall(r"\x1b\[\d+m", screen(TIGHT)) == ["\x1b[33m", "\x1b[1m", "\x1b[0m"]


MANY = [
    ("/records/a/long/path/to/the/first.json", REFUSED),
    ("second.json", TIGHT),
    ("third.json", ALL["virtual"]),
]


def test_many_records_are_one_table() -> None:
    assert plain(table(MANY, 200)).splitlines() == [
        "record                                  GPU                         chunk       need  headroom  verdict",
        "/records/a/long/path/to/the/first.json  H200, 139.80 GiB             8192  ~1696 MiB   512 MiB  does-not-fit",
        "second.json                             H200, 139.80 GiB             2048    424 MiB   516 MiB  tight",
        "third.json                              H200 (virtual), 139.80 GiB   2048    424 MiB   516 MiB  tight",
    ]


@pytest.mark.parametrize("width", [30, 40, 62, 70, 80, 100])
def test_a_narrow_terminal_cuts_names_and_no_numbers(width: int) -> None:
    text = plain(table(MANY, width))
    lines = text.splitlines()
    assert all(text.count(part) == times for part, times in (("1696 MiB", 1), ("424 MiB", 2), ("does-not-fit", 1)))
    if width >= 62:
        assert len(lines) == 4
        assert max(map(len, lines)) <= width
        assert "first.json" in lines[1] or "irst.json" in lines[1] or "st.json" in lines[1]
    else:
        assert len(lines) == 18
        assert max(len(line) for line in lines if not line.endswith(".json")) <= width


def test_a_record_without_a_need_has_a_row_too_and_other_models_are_pointed_out() -> None:
    other = dataclasses.replace(FAULT, model={**FAULT.model, "architecture": "Other"})
    lines = plain(table([("a", TIGHT), ("b", other)], 100)).splitlines()
    assert re.search(r"8192 +- +512 MiB +fault$", lines[2])
    assert lines[3] == "These are not of the same model: needs cannot be compared."
