from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from prefill_probe.sizes import GIB, MIB
from prefill_probe.virtual import virtual_gpu
from prefill_probe.virtual.cards import card_of
from prefill_probe.virtual.device import Device
from prefill_probe.virtual.errors import UntraceableError


@pytest.fixture
def device() -> Iterator[Device]:
    if torch.cuda.is_available():
        pytest.skip("this process has a real GPU")
    with virtual_gpu(card_of(16 * GIB, (12, 0))) as device:
        yield device


def allocated(device: Device) -> float:
    return device.allocator.allocated / MIB


def test_a_device_tensor_is_a_cuda_tensor_and_takes_its_bytes_while_it_lives(device: Device) -> None:
    tensor = torch.empty(1024, 1024, device="cuda")
    assert tensor.is_cuda
    assert tensor.device == torch.device("cuda", 0)
    assert allocated(device) == 4
    del tensor
    assert allocated(device) == 0


def test_a_huge_tensor_takes_no_host_memory(device: Device) -> None:
    tensor = torch.zeros(8 * GIB, dtype=torch.uint8, device="cuda")
    tensor.fill_(3)
    assert allocated(device) == 8 * 1024
    assert tensor[1:].data_ptr() == tensor.data_ptr() + 1


def test_a_view_shares_its_storage_which_lives_as_long_as_the_last_of_them(device: Device) -> None:
    tensor = torch.empty(1 << 20, device="cuda")
    view = tensor.view(1024, 1024)[512:].t()
    assert allocated(device) == 4
    del tensor
    assert allocated(device) == 4
    del view
    assert allocated(device) == 0


def test_in_place_and_out_variants_take_nothing(device: Device) -> None:
    tensor = torch.empty(1 << 20, device="cuda")
    assert tensor.add_(1) is tensor
    assert torch.mul(tensor, 2, out=tensor) is tensor
    assert allocated(device) == 4


def test_temporaries_of_composite_operators_are_counted(device: Device) -> None:
    with torch.inference_mode():
        tensor = torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16)
        device.allocator.forget_peaks()
        before = device.allocator.allocated
        torch.nn.functional.silu(tensor.float() * 2)
        assert (device.allocator.peak_allocated - before) / MIB == 8  # the product and its silu; .float() is gone


def test_indices_are_computed_for_real(device: Device) -> None:
    counts = torch.tensor([1, 2, 3], device="cuda")
    assert torch.repeat_interleave(counts).tolist() == [0, 1, 1, 2, 2, 2]
    counts[1] = 7
    assert counts.cumsum(0)[-1].item() == 11
    assert counts[[0, 2]].cpu().tolist() == [1, 3]
    assert torch.arange(3, device="cuda").to(torch.int32)[counts > 2].tolist() == [1, 2]


def test_what_only_a_gpu_would_have_computed_is_not_guessed(device: Device) -> None:
    scores = torch.randn(1 << 20, device="cuda")
    with pytest.raises(UntraceableError, match="aten::nonzero"):
        scores.nonzero()
    with pytest.raises(UntraceableError, match="aten::_local_scalar_dense"):
        scores.argmax().item()
    with pytest.raises(UntraceableError, match="mask"):
        scores[scores > 0]


def test_an_operator_without_a_rule_for_shapes_is_named(device: Device) -> None:
    library = torch.library.Library("prefill_probe_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    with pytest.raises(UntraceableError, match="no rule") as caught:
        torch.ops.prefill_probe_test.opaque(torch.randn(1 << 18, device="cuda"))
    assert caught.value.operator == "prefill_probe_test::opaque"


def test_out_of_memory_has_the_text_of_a_gpu(device: Device) -> None:
    keep = torch.empty(14 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB ")
    from prefill_probe.faults import classify

    fault = classify(caught.value)
    assert fault.is_memory
    assert fault.requested_bytes == 2 * GIB
    assert fault.free_bytes is not None
    assert abs(fault.free_bytes - device.free_bytes) < 10 * MIB
    del keep


def test_torch_cuda_answers_for_the_card_and_is_as_before_afterwards() -> None:
    if torch.cuda.is_available():
        pytest.skip("this process has a real GPU")
    with virtual_gpu(card_of(16 * GIB, (9, 0))) as device:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.mem_get_info()[0] == device.free_bytes < 16 * GIB
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_stream() != stream
    assert not torch.cuda.is_available()
    assert not hasattr(torch.cuda.current_stream, "_mock_name")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")


def test_a_graph_keeps_the_memory_of_its_capture(device: Device) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(4 * MIB, dtype=torch.uint8, device="cuda").add_(1)
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    held = device.allocator.reserved
    assert held >= 4 * MIB
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    assert device.allocator.reserved < held


def test_host_tensors_stay_host_tensors(device: Device) -> None:
    host = torch.ones(4, dtype=torch.int32, pin_memory=True)
    assert host.is_pinned()
    assert not host.is_cuda
    assert host.pin_memory().to("cuda", non_blocking=True).is_cuda
    assert allocated(device) == 0


def test_triton_launches_do_nothing(device: Device) -> None:
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(pointer, size: triton.language.constexpr):  # type: ignore[no-untyped-def]
        pass

    assert kernel[(1,)](torch.empty(4, device="cuda"), size=4) is None


def test_a_norm_that_a_gpu_has_one_kernel_for_takes_its_result_and_one_number_a_row(device: Device) -> None:
    if not hasattr(torch.ops.aten, "_fused_rms_norm"):
        pytest.skip("this torch composes the norm of other operators, on a GPU too")
    x = torch.empty(4096, 2048, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(2048, dtype=torch.bfloat16, device="cuda")
    before = device.allocator.allocated
    device.allocator.forget_peaks()
    with torch.inference_mode():
        normed = torch.nn.functional.rms_norm(x, (2048,), weight, 1e-6)
    assert device.allocator.peak_allocated - before == 4096 * (2048 * 2 + 4)
    assert normed.is_contiguous()


def test_an_operator_that_only_a_gpu_has_is_answered_by_shape_for_small_tensors_too(device: Device) -> None:
    q, k, v = torch.zeros(3, 1, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (sums.shape, sums.dtype) == ((1, 4, 2), torch.float32)
