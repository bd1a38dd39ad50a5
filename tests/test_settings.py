from __future__ import annotations

from pathlib import Path

import pytest

from prefill_probe import Mode, ProbeSettings
from prefill_probe.settings import Preflight, parse_shapes


def test_an_empty_environment_is_the_default() -> None:
    assert ProbeSettings.from_environ({"PREFILL_PROBE": ""}) == ProbeSettings(guard=True)
    assert ProbeSettings().mode is Mode.ENFORCE


def test_every_setting_has_its_variable() -> None:
    environ = {
        "PREFILL_PROBE": "warn",
        "PREFILL_PROBE_MARGIN": "1GiB",
        "PREFILL_PROBE_TIMEOUT": "12.5",
        "PREFILL_PROBE_SHAPES": "packed, deep",
        "PREFILL_PROBE_REPORT": "/var/lib/x.json",
        "PREFILL_PROBE_METRICS": "/var/lib/x.prom",
        "PREFILL_GUARD": "off",
        "PREFILL_PROBE_PREFLIGHT": "refuse",
    }
    shapes, report = ("full", "deep", "packed"), Path("/var/lib/x.json")
    expected = ProbeSettings(
        Mode.WARN, 1 << 30, 12.5, shapes, report, preflight=Preflight.REFUSE, metrics=Path("/var/lib/x.prom")
    )
    assert ProbeSettings.from_environ(environ) == expected


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("PREFILL_PROBE", "yes", "enforce, warn, adapt, adapt-kv or off"),
        ("PREFILL_PROBE", "adjust", "use enforce, warn, adapt, adapt-kv or off"),
        ("PREFILL_PROBE_MARGIN", "128", "a number with a unit"),
        ("PREFILL_PROBE_TIMEOUT", "0", "seconds above 0"),
        ("PREFILL_PROBE_TIMEOUT", "inf", "seconds above 0"),
        ("PREFILL_PROBE_TIMEOUT", "soon", "seconds above 0"),
        ("PREFILL_PROBE_PREFLIGHT", "enforce", "warn, refuse or off"),
    ],
)
def test_a_bad_value_names_its_variable_and_what_is_accepted(variable: str, value: str, accepted: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable}: .*{accepted}"):
        ProbeSettings.from_environ({variable: value})


def test_shapes_are_named_or_automatic_and_the_full_chunk_is_always_among_them() -> None:
    assert parse_shapes("auto") == ("full", "deep", "packed", "image")
    assert parse_shapes("decode,auto") == ("full", "deep", "packed", "decode", "image")
    assert parse_shapes("full") == ("full",)
    for text in ("", "deepest", "full,,deep"):
        with pytest.raises(ValueError, match="is not a shape; use auto, or some of full, first"):
            parse_shapes(text)
