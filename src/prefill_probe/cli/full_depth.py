"""The process that plans a model at full depth while ``check`` runs its first layers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from prefill_probe.cli.options import end
from prefill_probe.faults import EX_SOFTWARE

if TYPE_CHECKING:
    from prefill_probe.advice import Point
    from prefill_probe.record import Advice, ProbeRecord
    from prefill_probe.virtual.device import Card


class FullDepth:
    """The answers of ``engine_hooks.freetoken.full_depth``.

    Attributes:
        plan: of a start with all layers; nothing was run.
        start: the engine's arguments with the first layers.
        ratio_governs: whether pools are planned by a share of free memory.
    """

    def __init__(self, process: subprocess.Popen[str], log: IO[str], question: dict[str, Any]) -> None:
        from prefill_probe.record import ProbeRecord

        self._process = process
        self._log = log
        answer = self._ask(question)
        if "error" in answer:
            end("check", answer["status"], answer["error"])
        self.plan = ProbeRecord.from_json(json.dumps(answer["plan"]))
        self.start: list[str] = answer["start"]
        self.ratio_governs: bool = answer["ratio_governs"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().strip().splitlines() or ["it does not say why"]
            end("check", EX_SOFTWARE, f"the plan of all layers ends: {said[-1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def advice(self, record: ProbeRecord, points: Sequence[Point]) -> list[Advice]:
        """What the planner would do with ``record``; nothing of it is run."""
        from prefill_probe.record import Advice

        question = {
            "points": [(point.tokens, point.need_bytes) for point in points],
            "chunk_tokens": record.chunk.effective,
            "headroom_bytes": record.memory.headroom_bytes,
            "margin_bytes": record.memory.margin_bytes,
        }
        return [Advice(**line) for line in self._ask(question)["advice"]]


@contextlib.contextmanager
def full_depth(
    arguments: Sequence[str], layers: int, directory: Path, card: Card, environment: Mapping[str, str]
) -> Iterator[FullDepth]:
    """The plan of ``arguments`` on ``card``; ``directory`` gets the model with its first ``layers`` layers.

    Where there is none, ``check`` ends with why. The process has ended when the block does.
    """
    question = {"arguments": list(arguments), "layers": layers, "directory": str(directory), "card": asdict(card)}
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed with the process)
    process = subprocess.Popen(
        [sys.executable, "-m", "engine_hooks.freetoken.full_depth"],
        env={**environment, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TQDM_DISABLE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        yield FullDepth(process, log, question)
    finally:
        process.kill()
        process.communicate()
        log.close()
