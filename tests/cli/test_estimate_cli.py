from __future__ import annotations

import pytest
from click.testing import CliRunner

from prefill_probe.cli import main


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["estimate", *arguments])
    assert result.exit_code == 2, result.output
    return result.output.splitlines()[-1]


def test_help_carries_an_example() -> None:
    result = CliRunner().invoke(main, ["estimate", "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output


@pytest.mark.parametrize("size", ["0B", "0", "-1GiB", "16", "11TiB", "much"])
def test_memory_that_no_gpu_has_is_refused_by_name(size: str) -> None:
    said = refused("--vram", size, "--", "ft", "serve", "--model", "x")
    assert "--vram" in said
    assert repr(size) in said


@pytest.mark.parametrize("command", [("vllm", "serve"), ("ft", "bench"), ("ft",)])
def test_only_a_serve_command_line_is_accepted(command: tuple[str, ...]) -> None:
    assert "ft serve --model DIR" in refused("--vram", "16GiB", "--", *command)


@pytest.mark.parametrize("arguments", [("--layers", "0"), ("--layers", "4", "--", "ft", "serve", "--model", "x")])
def test_layers_are_at_least_one_and_the_reference_engines(arguments: tuple[str, ...]) -> None:
    assert "--layers" in refused("--vram", "16GiB", *arguments)


def test_a_command_line_without_a_model_is_refused() -> None:
    assert "--model DIR" in refused("--vram", "16GiB", "--", "ft", "serve")


@pytest.mark.parametrize(
    ("option", "value"), [("--capability", "twelve"), ("--capability", "7.5"), ("--memory-ratio", "2")]
)
def test_other_bad_values_are_refused_by_name(option: str, value: str) -> None:
    said = refused("--vram", "16GiB", option, value, "--", "ft", "serve", "--model", "x")
    assert option in said
    assert repr(value) in said


@pytest.mark.engine
def test_a_card_that_is_not_known_is_refused_with_the_closest() -> None:
    pytest.importorskip("freetoken")
    assert "did you mean RTX 5080?" in refused("--gpu", "rtx 508", "--", "ft", "serve", "--model", "x")


@pytest.mark.engine
def test_a_gpu_must_be_said() -> None:
    pytest.importorskip("freetoken")
    assert "--vram 15.5GiB" in refused("--", "ft", "serve", "--model", "x")
