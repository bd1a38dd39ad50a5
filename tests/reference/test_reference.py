"""What ``prefill-probe check`` gets where it cannot be had."""

from __future__ import annotations

import pytest

from prefill_probe import ProbeSettings
from prefill_probe.reference import MissingError, check_reference

torch = pytest.importorskip("torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_check_is_unavailable_and_says_what_is() -> None:
    with pytest.raises(MissingError, match=r"no CUDA GPU answers.*prefill-probe estimate") as refusal:
        check_reference(ProbeSettings())
    assert refusal.value.exit_status == 69
