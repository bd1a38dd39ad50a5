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
    # What a chunk was let through for is its own, whoever takes all that is free as soon as it has begun.
    assert found["taken_under_way_0"] == [[CHUNK]]
    [[smaller_too]] = found["taken_under_way_1"]
    assert CHUNK // 4 <= smaller_too < CHUNK
    delayed = [0, CHUNK - smaller, CHUNK - smaller + CHUNK - smaller_too]
    counters = [
        {"passes_shrunk": times, "tokens_delayed": tokens, "requests_refused": 1, "misses": 0}
        for times, tokens in enumerate(delayed)
    ]
    assert (found["counters"], found["misses"]) == (counters[-1], [])
    # Told when it changes, and not at any of the other passes.
    assert found["counts"] == counters
    assert found["after"] == found["before"]
