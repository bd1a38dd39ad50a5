from __future__ import annotations

import io
import json
import sys

import pytest

from prefill_probe.logs import get_logger

NAMED = "PrefillOOMError: a full prefill chunk does not fit this GPU.\n  chunk        8192 tokens\nStart again with …"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, text: str, level: str = "error") -> list[str]:
    monkeypatch.setattr(sys, "stderr", stream)
    getattr(get_logger(), level)(text)
    return stream.getvalue().splitlines()


def test_a_line_is_a_json_object_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = logged(monkeypatch, io.StringIO(), "fits: a prefill chunk of 2048 tokens", "info")
    found = json.loads(line)
    assert (found["level"], found["event"]) == ("info", "fits: a prefill chunk of 2048 tokens")
    assert found["logger"] == "prefill-probe"
    assert found["timestamp"].endswith("Z")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_named_error_is_a_screen_of_plain_lines_in_both(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    lines = logged(monkeypatch, stream(), NAMED)
    assert "\n".join(lines).endswith(NAMED)
    if stream is io.StringIO:
        assert json.loads(lines[0])["event"] == NAMED.splitlines()[0]


def test_colours_are_for_terminals_and_not_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in "".join(logged(monkeypatch, Terminal(), "x"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in "".join(logged(monkeypatch, Terminal(), "x"))


# HANDLERS and BASIC_FORMAT are names of the logging module, and no levels.
@pytest.mark.parametrize("value", ["", "loud", "HANDLERS", "BASIC_FORMAT", "getLogger", "10"])
def test_a_level_that_is_none_is_info(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PREFILL_PROBE_LOG", value)
    assert logged(monkeypatch, io.StringIO(), "x", "debug") == []
    assert len(logged(monkeypatch, io.StringIO(), "x", "info")) == 1


def test_the_level_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFILL_PROBE_LOG", "Debug")
    assert len(logged(monkeypatch, io.StringIO(), "x", "debug")) == 1
    monkeypatch.setenv("PREFILL_PROBE_LOG", "error")
    assert logged(monkeypatch, io.StringIO(), "x", "warning") == []
