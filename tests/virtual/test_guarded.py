"""The guard against the engine's own scheduler: what it lets through, what it ends, and what is left of that."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm import document

from prefill_probe.geometry import make_model

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
CHUNK = 1024


def test_a_prompt_refused_with_a_chunk_in_flight_gives_all_back_and_full_chunks_return_in_the_next_pass(
    tmp_path: Path,
) -> None:
    pytest.importorskip("freetoken")
    model = make_model(tmp_path / "model", "flash-next-nvfp4", layers=4)
    found = document(HERE / "guarded.py", str(model))

    assert found["first"] == [[CHUNK]]
    # One answer, and not that it was aborted, which is what a client gets that asked for it.
    [(refused, (code, text))] = found["refused"].items()
    assert (refused, code) == ("2", "insufficient_memory")
    assert "64 tokens" in text
    assert found["after_refusal"] == found["before"]

    [[smaller]] = found["shrunk"]
    assert CHUNK // 4 <= smaller < CHUNK
    assert smaller % 64 == 0
    assert found["next_pass"] == [[CHUNK]]
    assert set(found["errors"]) == {"2"}  # the third prompt was slower, and was answered
    counters = {"passes_shrunk": 1, "tokens_delayed": CHUNK - smaller, "requests_refused": 1, "misses": 0}
    assert (found["counters"], found["misses"]) == (counters, [])
    # Told when it changes, and not at any of the other passes.
    assert found["counts"] == [{**counters, "passes_shrunk": 0, "tokens_delayed": 0}, counters]
    assert found["after"] == found["before"]
