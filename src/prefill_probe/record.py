"""ProbeRecord: the JSON document of one probe, and how it is written and read (docs/record.md)."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import tempfile
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
VERDICTS = ("fits", "tight", "does-not-fit", "inconclusive", "fault")
# A list of numbers over several lines. No string can look like it: in JSON text a string has no line breaks.
_NUMBERS = re.compile(r"\[(\n\s+-?\d[^\[\]{}\"]*)\]")


class RecordError(ValueError):
    """A document that is not a record this version can read; the text says why in one line."""


@dataclass(frozen=True)
class Ledgers:
    """A transient in both ledgers, in bytes: allocator (allocated, reserved) and device."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Oom:
    """An allocation that failed. ``free_bytes`` is the device's free memory at that moment."""

    requested_bytes: int | None
    free_bytes: int | None
    site: str


@dataclass(frozen=True)
class MadeOf:
    """What a peak was made of: bytes by component, largest first, and the largest single allocation."""

    components: dict[str, int]
    largest_bytes: int
    largest_site: str


@dataclass(frozen=True)
class Timeline:
    """Live memory over the chunk: of each moment the layer that ran (-1: none), and bytes by component."""

    layers: list[int]
    components: dict[str, list[int]]


@dataclass(frozen=True)
class Routing:
    """What the routers chose, by MoE layer: experts that were hit, and tokens of the most loaded one."""

    experts: int
    distinct: list[int]
    largest_load: list[int]


@dataclass(frozen=True)
class ShapeRun:
    """One run of one shape: ``run`` is cold, warm or virtual; ``outcome`` is ok, oom, fault or timeout.

    ``made_of``, ``routing`` and ``timeline`` are noted in one run of the worst shape.
    """

    name: str
    sequences: int
    new_tokens: int
    cached_tokens: int
    run: str
    outcome: str
    peak: Ledgers
    seconds: float
    tokens_per_second: float | None = None
    oom: Oom | None = None
    made_of: MadeOf | None = None
    routing: Routing | None = None
    advised: bool = False
    timeline: Timeline | None = None


@dataclass(frozen=True)
class Chunk:
    """Tokens asked for by flag, tokens that the scheduler will really issue, and what capped them."""

    requested: int
    effective: int
    capped_by: str = ""


@dataclass(frozen=True)
class Held:
    """Where memory that was free before loading is when the engine is idle, in bytes.

    All but the last are sums of the engine's own tensors, each storage once; ``graphs_bytes`` adds the private pools
    of captured graphs. ``other_bytes`` is the remainder: kernels, handles, workspaces, tables, rounding, and what
    others took meanwhile (0 where others gave back more than all that).
    """

    weights_bytes: int = 0
    expert_cache_bytes: int = 0
    kv_pool_bytes: int = 0
    state_pool_bytes: int = 0
    graphs_bytes: int = 0
    other_bytes: int = 0


@dataclass(frozen=True)
class Memory:
    """Memory around the probe, in bytes.

    ``free_after_graphs_bytes`` is free memory when the probe began; ``headroom_bytes`` what the process can obtain
    when idle and warm; ``warmed_bytes`` what the first run left behind for good (modules, handles).
    ``boot_peak`` is what the engine's own start had peaked at, over the device's whole use, before any reset.
    ``held`` says where the rest of ``free_before_load_bytes`` is, beside ``headroom_bytes``.
    """

    free_before_load_bytes: int
    free_after_graphs_bytes: int
    headroom_bytes: int
    margin_bytes: int
    total_bytes: int
    warmed_bytes: int = 0
    boot_peak: Ledgers | None = None
    held: Held | None = None


@dataclass(frozen=True)
class Need:
    """What a full chunk takes at most, in bytes: of each ledger the largest transient of any shape.

    Attributes:
        shape: the one with the largest transient of the device, which the verdict is about.
        estimated: extrapolated from its smaller sizes, not run.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    shape: str
    estimated: bool = False


@dataclass(frozen=True)
class Advice:
    """Flag values that would make the configuration fit; ``was_run`` says whether they were tried."""

    flags: dict[str, Any]
    was_run: bool
    peak_bytes: int | None
    leaves_bytes: int | None
    cost: str
    reason: str


@dataclass(frozen=True)
class FaultEntry:
    """What an error was; see ``faults.Fault``."""

    kind: str
    retryable: bool
    chunk_helps: bool
    ratio_helps: bool
    text: str


@dataclass(frozen=True)
class Rank:
    """One tensor-parallel rank's part of the verdict."""

    rank: int
    verdict: str
    headroom_bytes: int
    need_bytes: int | None


@dataclass(frozen=True)
class Neighbour:
    """Another process on the GPU, and what it holds: headroom that it would give back."""

    pid: int
    bytes: int


@dataclass(frozen=True)
class Reduced:
    """Chunks were run with the first ``layers`` of ``of`` layers; ``estimated`` names fields that were not measured."""

    layers: int
    of: int
    estimated: list[str]


@dataclass(frozen=True)
class ProbeRecord:
    """Everything one probe found out. Field by field in docs/record.md; sizes are bytes, times are seconds."""

    created: str
    verdict: str
    device: str
    engine: dict[str, str]
    model: dict[str, Any]
    gpu: dict[str, Any]
    flags: dict[str, Any]
    versions: dict[str, str]
    chunk: Chunk
    memory: Memory
    need: Need | None
    shapes: list[ShapeRun]
    advice: list[Advice]
    fault: FaultEntry | None
    ranks: list[Rank]
    timings: dict[str, float]
    neighbours: list[Neighbour] | None = None
    notes: list[str] = field(default_factory=list)
    adapted: dict[str, Any] | None = None
    miss: str | None = None
    reduced: Reduced | None = None
    perturbed_routers: int | None = None
    schema: int = field(default=SCHEMA)

    @property
    def judged(self) -> list[ShapeRun]:
        """The runs that the verdict is about: without those that tried advice."""
        return [run for run in self.shapes if not run.advised]

    def to_json(self) -> str:
        """The document, indented, lists of numbers in one line each, with a final newline."""
        document = dataclasses.asdict(self)
        first = ("schema", "created", "verdict", "device", "adapted")
        ordered = {key: document.pop(key) for key in first} | document
        text = json.dumps(ordered, indent=2, allow_nan=False)
        return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ProbeRecord:
        """A record from its document.

        Raises:
            RecordError: not JSON, of a newer schema, or a field is missing or of another type.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"not a JSON document: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
            raise RecordError("not a prefill-probe record: it has no schema number")
        if document["schema"] > SCHEMA:
            raise RecordError(
                f"schema {document['schema']} is newer than this version reads ({SCHEMA}); update prefill-probe"
            )
        record: ProbeRecord = _build(cls, document, "record")
        if record.verdict not in VERDICTS:
            raise RecordError(f"record.verdict: {record.verdict!r} is not one of {', '.join(VERDICTS)}")
        return record


def _build(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind`` (a dataclass, a generic or a plain type); unknown keys are left for newer readers."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        return _build(next(option for option in options if option is not type(None)), value, where)
    if origin is list:
        if not isinstance(value, list):
            raise RecordError(f"{where}: expected a list")
        return [_build(typing.get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{where}: expected an object")
        return {key: _build(typing.get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise RecordError(f"{where}: expected an object")
        hints = typing.get_type_hints(kind)
        arguments = {}
        for entry in dataclasses.fields(kind):
            if entry.name in value:
                arguments[entry.name] = _build(hints[entry.name], value[entry.name], f"{where}.{entry.name}")
            elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
                raise RecordError(f"{where}: {entry.name} is missing")
        return kind(**arguments)  # type: ignore[operator]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{where}: expected {kind.__name__}")
    return value


def state_directory(environ: Mapping[str, str]) -> Path:
    """Where records are kept: ``$STATE_DIRECTORY`` (of a systemd unit), ``$XDG_STATE_HOME/prefill-probe`` or
    ``~/.local/state/prefill-probe``."""
    if unit := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(unit)
    if xdg := environ.get("XDG_STATE_HOME", ""):
        return Path(xdg) / "prefill-probe"
    return Path(environ.get("HOME") or Path.home()) / ".local" / "state" / "prefill-probe"


def default_report(environ: Mapping[str, str]) -> Path:
    """The file of the last record of this machine."""
    return state_directory(environ) / "last.json"


def write_record(record: ProbeRecord, path: Path) -> None:
    """Write ``record`` to ``path``: readable by its owner alone, whole or not at all (write, fsync, rename).

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    replace_file(path, record.to_json())


def check_place(path: Path) -> None:
    """Raise the ``OSError`` that writing a file to ``path`` would end with, as far as is known without writing.

    Folders above it that are missing are made when it is written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    above = next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(above))
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(above))


def replace_file(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Write ``content`` to ``path``, whole or not at all (write, fsync, rename).

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:
        pass  # not every file system can; the record itself is safe
    finally:
        os.close(folder)


def read_record(path: Path) -> ProbeRecord:
    """The record in ``path``.

    Raises:
        RecordError: it cannot be read, or is not a record; the text names the file.
    """
    try:
        return ProbeRecord.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None
