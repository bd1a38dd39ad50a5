from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_probe.sizes import gib, mib, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("128MiB", 128 << 20), ("1.5 GiB", 3 << 29), ("0B", 0), ("2G", 2 << 30), ("10mb", 10_000_000), (" 7 KiB ", 7168)],
)
def test_a_number_with_a_unit_is_a_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "128", "-1MiB", "MiB", "1 parsec", "1e3MiB", "nanGiB", "1,5GiB", "\u0661MiB"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 128MiB"):
        parse_size(text)


@given(st.text())
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except ValueError:
        pass


def test_sizes_are_written_in_binary_units() -> None:
    assert mib(1682 << 20) == "1682 MiB"
    assert gib(3 << 29) == "1.50 GiB"
