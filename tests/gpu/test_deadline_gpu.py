"""On a machine with a CUDA GPU: a kernel that spins does not outlast the deadline."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.gpu
def test_a_kernel_that_spins_on_the_device_is_ended_with_70_and_its_memory_is_released() -> None:
    import torch

    code = """
    import torch
    from prefill_probe.meter import CudaMeter
    from prefill_probe.watch import deadline
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    meter = CudaMeter(held.device)
    def report():
        print("load", meter.load(), flush=True)
    with deadline(2, report):
        torch.cuda._sleep(10**13)
        torch.cuda.synchronize()
    """
    before = torch.cuda.mem_get_info()[0]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 70, done.stderr
    assert "load Load(" in done.stdout
    assert "synchronize" in done.stderr
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)


@pytest.mark.gpu
def test_both_ledgers_see_a_transient_and_forget_it() -> None:
    import torch

    from prefill_probe.meter import CudaMeter

    meter = CudaMeter(torch.device("cuda", 0))
    torch.empty(1, device="cuda")
    idle = meter.read()
    with meter.measure(idle) as measured:
        torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    assert measured.peak.allocated_bytes == 300 << 20
    assert 300 << 20 <= measured.peak.reserved_bytes <= 322 << 20
    assert measured.peak.device_bytes >= measured.peak.reserved_bytes
    assert meter.read().free_bytes >= idle.free_bytes - (2 << 20)
