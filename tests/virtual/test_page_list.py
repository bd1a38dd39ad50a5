"""The engine makes a new list of free pages after every step: beside a large pool most of what a small chunk needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm import document

from prefill_probe.geometry import make_model

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
# Half of an H200's memory for one layer of attention.
PAGES, CHUNK = 33_666_200, 512
ALLOCATOR_PAGE = 20 << 20


def test_the_need_has_the_lists_of_free_pages_that_requests_come_to(tmp_path: Path) -> None:
    pytest.importorskip("freetoken")
    model = make_model(tmp_path / "model", "qwen36-35b-a3b-bf16", layers=4)
    found = document(HERE / "page_list.py", str(model), str(PAGES), str(CHUNK))
    need, seen = found["need"], found["seen"]
    assert seen["device_bytes"] > 2 * 4 * PAGES
    # Requests in another order would come to a page more, which the probe has tried.
    assert seen["device_bytes"] * 0.99 <= need["device_bytes"] <= seen["device_bytes"] * 1.02 + ALLOCATOR_PAGE
    # Requests have three lists at once on the device, of which the allocator counts two.
    assert seen["allocated_bytes"] * 0.99 <= need["allocated_bytes"] <= seen["allocated_bytes"] + 4 * PAGES
