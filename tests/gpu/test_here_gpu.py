from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CODE = """
from prefill_probe.virtual.here import card_here
card = card_here()
import torch
assert not torch.cuda.is_initialized()
real = torch.cuda.get_device_properties(0)
assert card.name == real.name, (card, real)
assert card.total_bytes == real.total_memory, (card, real)
assert card.capability == (real.major, real.minor), (card, real)
assert card.multiprocessors == real.multi_processor_count, (card, real)
assert 0 < card.usable_bytes <= card.total_bytes
assert torch.cuda.mem_get_info()[0] <= card.usable_bytes, "a context takes some of what was free"
"""


def test_the_card_is_the_one_that_torch_sees() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
