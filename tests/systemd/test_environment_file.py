from __future__ import annotations

import pytest

from prefill_probe.systemd.environment_file import parse_environment


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=b c ", "b c"),
        ("A=", ""),
        ('A="b c "', "b c "),
        ("A='b\"c'", 'b"c'),
        ("A=b'c'", "b'c'"),
        ("A='b' c", "bc"),
        (r"A=b\c\\", "bc\\"),
        (r'A="b\c\"\$\\"', r"b\c" + '"$\\'),
        (r"A='b\c'", r"b\c"),
        ("A=b\\\nc", "bc"),
        ('A="b\nc"', "b\nc"),
        ("A=$B ${B}", "$B ${B}"),
        (" A =b#c", "b#c"),
    ],
)
def test_values(text: str, value: str) -> None:
    assert parse_environment(f"# first\n{text}\nZ=last\n") == {"A": value, "Z": "last"}


def test_lines_that_set_nothing_are_skipped() -> None:
    assert parse_environment("; comment\n# A=1\nexport\n2B=3\nC=4\nC=5\n\n") == {"C": "5"}
