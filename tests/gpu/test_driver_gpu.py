from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CODE = """
from prefill_probe import driver
card = driver.card_here()
import torch
assert not torch.cuda.is_initialized()
assert driver.count() == torch.cuda.device_count()
real = torch.cuda.get_device_properties(0)
assert (card.name, card.total_bytes) == (real.name, real.total_memory), (card, real)
assert card.capability == (real.major, real.minor), (card, real)
assert card.multiprocessors == real.multi_processor_count, (card, real)
assert card.shared_bytes == real.shared_memory_per_block_optin, (card, real)
assert card.integrated == bool(real.is_integrated), (card, real)
assert 0 < card.usable_bytes <= card.total_bytes
free = torch.cuda.mem_get_info()[0]
assert free <= card.usable_bytes, "a context takes some of what was free"
again = driver.card_here().usable_bytes
assert abs(again - free) <= 64 << 20, (again, free)
"""


def test_the_driver_and_torch_say_the_same_of_a_card() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
