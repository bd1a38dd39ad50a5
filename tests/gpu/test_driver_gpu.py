from __future__ import annotations

import pytest

from prefill_probe import driver
from prefill_probe.sizes import MIB

pytestmark = pytest.mark.gpu


def test_the_driver_and_torch_say_the_same_of_a_card() -> None:
    import torch

    card = driver.card_at("0", driver.free_bytes())
    properties = torch.cuda.get_device_properties(0)
    assert card is not None
    assert (card.name, card.total_bytes) == (properties.name, properties.total_memory)
    assert (card.capability, card.multiprocessors) == (
        (properties.major, properties.minor),
        properties.multi_processor_count,
    )
    assert card.shared_bytes == properties.shared_memory_per_block_optin
    free, _ = torch.cuda.mem_get_info(0)
    again = driver.card_at("0", driver.free_bytes())
    assert again is not None
    assert again.usable_bytes == pytest.approx(free, abs=64 * MIB)
