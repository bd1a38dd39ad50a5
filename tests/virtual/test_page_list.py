"""The engine makes a new list of free pages after every step: beside a large pool most of what a small chunk needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm import document

from prefill_probe.geometry import make_model

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
CHUNK = 512
PAGE = 20 << 20


@pytest.mark.parametrize("pages", [2_000_000, 33_666_200])
def test_the_need_has_the_lists_of_free_pages_that_requests_come_to(tmp_path: Path, pages: int) -> None:
    pytest.importorskip("freetoken")
    model = make_model(tmp_path / "model", "qwen36-35b-a3b-bf16", layers=4)
    found = document(HERE / "page_list.py", str(model), str(pages), str(CHUNK))
    need, seen = found["need"], found["seen"]
    assert seen["device_bytes"] > 2 * 4 * pages
    # Requests in another order would come to a page more, which the probe has tried.
    assert seen["device_bytes"] * 0.99 <= need["device_bytes"] <= seen["device_bytes"] * 1.02 + PAGE
    # Requests have three lists at once on the device, of which the allocator counts two.
    assert seen["allocated_bytes"] * 0.99 <= need["allocated_bytes"] <= seen["allocated_bytes"] + 4 * pages
