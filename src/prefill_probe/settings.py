"""ProbeSettings: what a user can say about the probe, by flag or by environment variable."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefill_probe.shape import AUTOMATIC, FAMILIES
from prefill_probe.sizes import MIB, parse_size


class Mode(str, enum.Enum):
    """What happens when a full chunk does not fit."""

    ENFORCE = "enforce"
    WARN = "warn"
    ADAPT = "adapt"
    ADAPT_KV = "adapt-kv"
    OFF = "off"

    @property
    def adapts(self) -> bool:
        """Whether a start goes on with a value that was run."""
        return self in (Mode.ADAPT, Mode.ADAPT_KV)


class Preflight(str, enum.Enum):
    """What an estimate made before any weight is read does to a start."""

    WARN = "warn"
    REFUSE = "refuse"
    OFF = "off"


def parse_preflight(text: str) -> Preflight:
    """What the estimate before the start may do.

    Raises:
        ValueError: an unknown word.
    """
    try:
        return Preflight(text)
    except ValueError:
        raise ValueError(f"{text!r} is not accepted; use warn, refuse or off") from None


def parse_mode(text: str) -> Mode:
    """A mode word.

    Raises:
        ValueError: an unknown word.
    """
    try:
        return Mode(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a mode; use enforce, warn, adapt, adapt-kv or off") from None


def parse_switch(text: str) -> bool:
    """``on`` or ``off``.

    Raises:
        ValueError: another word.
    """
    if text not in ("on", "off"):
        raise ValueError(f"{text!r} is neither on nor off")
    return text == "on"


def parse_seconds(text: str) -> float:
    """A positive number of seconds.

    Raises:
        ValueError: not a number, zero, negative or infinite.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is not a number of seconds above 0")
    return seconds


def parse_shapes(text: str) -> tuple[str, ...]:
    """Words of the shapes to run, separated by commas; ``auto``: the fewest that cover what the engine can issue.

    The full chunk is always run.

    Raises:
        ValueError: an unknown word.
    """
    words = [word.strip() for word in text.split(",")]
    known = [family.word for family in FAMILIES]
    if unknown := [word for word in words if word not in ("auto", *known)]:
        raise ValueError(f"{unknown[0]!r} is not a shape; use auto, or some of {', '.join(known)}")
    chosen = {word for given in words for word in (AUTOMATIC if given == "auto" else (given,))} | {"full"}
    return tuple(word for word in known if word in chosen)


def parse_report(text: str) -> Path:
    """The file that the record goes to.

    Raises:
        ValueError: an empty path.
    """
    if not text:
        raise ValueError("the path of the report is empty")
    return Path(text)


def parse_metrics(text: str) -> Path:
    """The file that metrics go to.

    Raises:
        ValueError: an empty path.
    """
    if not text:
        raise ValueError("the path of the metrics file is empty")
    return Path(text)


@dataclass(frozen=True)
class ProbeSettings:
    """How one probe is run.

    Attributes:
        mode: what a chunk that does not fit does to the boot.
        margin_bytes: headroom that must remain after the need for the verdict ``fits``; None is 128 MiB, and more
            where free memory is not what it seems (``margin_for``).
        timeout_seconds: after this long the probe counts as hung.
        shapes: words of the shapes to run (``shape.FAMILIES``).
        guard: whether sizes below the full chunk are measured too, for the guard (``guard.Needs``).
        report: file of the record; None is the state directory (``record.default_report``).
        preflight: what the estimate before the start may do; only a server's start has one.
        metrics: file of the metrics of a server (``metrics.ServerMetrics``); None: none is written.
    """

    mode: Mode = Mode.ENFORCE
    margin_bytes: int | None = None
    timeout_seconds: float = 300.0
    shapes: tuple[str, ...] = AUTOMATIC
    report: Path | None = None
    guard: bool = False
    preflight: Preflight = Preflight.WARN
    metrics: Path | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ProbeSettings:
        """Settings from ``PREFILL_PROBE`` and its companions; an unset or empty variable means the default.

        Raises:
            ValueError: a bad value; the message names the variable and what is accepted.
        """
        found: dict[str, Any] = {}
        for option in OPTIONS:
            text = environ.get(option.variable, "") or option.preset
            if not text:
                continue
            try:
                found[option.field] = option.parse(text)
            except ValueError as error:
                raise ValueError(f"{option.variable}: {error}") from None
        return cls(**found)


def margin_for(settings: ProbeSettings, *, wsl: bool, unified: bool) -> tuple[int, str]:
    """The margin in bytes, and why it is larger than the usual 128 MiB where it is.

    A margin that was given is kept. On WSL2 the driver pages to system memory before it says that none is left, below
    what it reports as free; with unified memory the GPU's memory is the host's, and running out stops the machine.
    """
    if settings.margin_bytes is not None:
        return settings.margin_bytes, ""
    if unified:
        return 2048 * MIB, "the GPU shares its memory with the host"
    if wsl:
        return 1024 * MIB, "on WSL2 not all memory that is reported free can be had"
    return 128 * MIB, ""


@dataclass(frozen=True)
class Option:
    """One setting as a user meets it: a flag of the engine's command and its environment twin.

    ``default`` is the text that stands for the default in help. ``preset`` is what an engine's start takes where
    nothing is given, if that is not the default of ``ProbeSettings``.
    """

    flag: str
    variable: str
    field: str
    parse: Callable[[str], Any]
    metavar: str
    default: str
    help: str
    preset: str = ""


OPTIONS: tuple[Option, ...] = (
    Option(
        "--prefill-probe",
        "PREFILL_PROBE",
        "mode",
        parse_mode,
        "{enforce,warn,adapt,adapt-kv,off}",
        "enforce",
        "Run one prefill chunk of the largest size before serving. A chunk that does not fit: enforce: stops the start "
        "with the values to use instead; warn: is logged, and the server serves; adapt: the chunk is lowered to the "
        "largest one that was run and fits; adapt-kv: the chunk stays, the caches shrink to sizes that were run. "
        "off: do not probe.",
    ),
    Option(
        "--prefill-probe-margin",
        "PREFILL_PROBE_MARGIN",
        "margin_bytes",
        parse_size,
        "SIZE",
        "128MiB",
        "GPU memory that must stay free after the chunk's peak; less is reported as tight.",
    ),
    Option(
        "--prefill-probe-timeout",
        "PREFILL_PROBE_TIMEOUT",
        "timeout_seconds",
        parse_seconds,
        "SECONDS",
        "300",
        "A probe that takes longer counts as hung: stacks are logged and the start ends.",
    ),
    Option(
        "--prefill-probe-shapes",
        "PREFILL_PROBE_SHAPES",
        "shapes",
        parse_shapes,
        "WORDS",
        "auto",
        "Which chunks to run, separated by commas: " + ", ".join(family.word for family in FAMILIES) + ". auto: the "
        "fewest that cover what the scheduler can issue.",
    ),
    Option(
        "--prefill-probe-report",
        "PREFILL_PROBE_REPORT",
        "report",
        parse_report,
        "FILE",
        "the state directory",
        "Where the probe's record (JSON) is written.",
    ),
    Option(
        "--prefill-probe-preflight",
        "PREFILL_PROBE_PREFLIGHT",
        "preflight",
        parse_preflight,
        "{warn,refuse,off}",
        "warn",
        "An estimate on a virtual GPU like this one, before the weights are read. warn: it runs beside the load and is "
        "logged; refuse: the load waits for it (30 s at most), and does not begin where the chunk is short of more "
        "than a tenth of its need; off: none.",
    ),
    Option(
        "--prefill-probe-metrics",
        "PREFILL_PROBE_METRICS",
        "metrics",
        parse_metrics,
        "FILE",
        "none",
        "A .prom file for node exporter's textfile collector: what the probe found, and what the guard did since.",
    ),
    Option(
        "--prefill-guard",
        "PREFILL_GUARD",
        "guard",
        parse_switch,
        "{on,off}",
        "on",
        "Start no prefill that cannot finish: while memory is short, prompts are processed in smaller chunks, and "
        "requests for which there is none left end with an error (503). Needs a start that was probed.",
        preset="on",
    ),
)
