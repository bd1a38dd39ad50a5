from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
st = pytest.importorskip("hypothesis.strategies")
from hypothesis import given  # noqa: E402

from prefill_probe.reference.moe import route, sort_rows  # noqa: E402


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.sampled_from([1, 4, 16]))
def test_every_row_is_once_in_a_block_of_its_expert(experts: list[int], block: int) -> None:
    rows, expert_of = sort_rows(torch.tensor(experts).view(-1, 1), 7, block)
    found = []
    for number, expert in enumerate(expert_of.tolist()):
        for row in rows[number * block : (number + 1) * block].tolist():
            if row == len(experts):
                continue
            assert expert == experts[row]
            found.append(row)
    assert sorted(found) == list(range(len(experts)))


def test_what_the_kernel_is_given_has_the_same_size_for_any_choice() -> None:
    alike, spread = torch.zeros(64, 2, dtype=torch.int64), torch.arange(128).view(64, 2) % 16
    sizes = {tuple(each.numel() for each in sort_rows(ids, 16, 16)) for ids in (alike, spread)}
    assert len(sizes) == 1


def test_routing_weights_are_the_highest_and_sum_to_one() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    weights, ids = route(scores, 2)
    assert ids.tolist() == [[1, 3]]
    assert weights.sum().item() == pytest.approx(1.0)
    assert (weights[0, 0] / weights[0, 1]).item() == pytest.approx(torch.tensor(1.0).exp().item())
