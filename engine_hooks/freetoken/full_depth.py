"""The plan of a model at full depth, for a check that runs its first layers only (``prefill-probe check --layers``).

Run it as a process of its own; it asks no GPU. Two questions and two answers, each one line of JSON:

1. the command line, the card and the depth -> what a start with all layers holds, and the arguments of a start with
   the first layers, in ``directory``, that issues the same chunks; or why there is none (``error``, ``status``);
2. what the chunks needed -> the advice that the planner gives for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from prefill_probe._advise import Adviser
from prefill_probe._probe import Session
from prefill_probe.advice import Point
from prefill_probe.record import ProbeRecord
from prefill_probe.settings import ProbeSettings
from prefill_probe.shallow import make_shallow
from prefill_probe.virtual.device import Card
from prefill_probe.virtual.errors import ModelError, StartError, StartFault, UntraceableError
from prefill_probe.virtual.records import as_virtual


def serve(questions: TextIO, answers: TextIO) -> None:
    """Answer both questions."""
    asked = json.loads(questions.readline())
    card = Card(**{**asked["card"], "capability": tuple(asked["card"]["capability"])})
    with contextlib.ExitStack() as stack:
        try:
            engine, plan = stack.enter_context(_planned(asked["arguments"], card))
            start = _shallow_start(engine, asked["arguments"], asked["layers"], Path(asked["directory"]))
        except (ModelError, StartError, StartFault, UntraceableError) as error:
            _answer(answers, {"error": str(error), "status": error.exit_status})
            return
        governs = engine.budget().ratio_governs
        _answer(answers, {"plan": json.loads(plan.to_json()), "start": start, "ratio_governs": governs})
        if line := questions.readline():
            _answer(answers, {"advice": _advice(engine, json.loads(line))})


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


@contextlib.contextmanager
def _planned(arguments: Sequence[str], card: Card) -> Iterator[tuple[Any, ProbeRecord]]:
    """The engine at the end of its start, and a record of it in which nothing was run."""
    from engine_hooks.freetoken.virtual import started

    with started(arguments, card) as (engine, device):
        session = Session(engine, ProbeSettings(), progress=lambda text: None, keep=lambda record: None)
        yield engine, as_virtual(session.record(), device)


def _shallow_start(engine: Any, arguments: Sequence[str], layers: int, directory: Path) -> list[str]:
    """The arguments of a start with the first layers, its pools as they are with all of them.

    Raises:
        ModelError: too few layers, or too many, or a model that cannot be reduced.
    """
    from engine_hooks.freetoken.layer_kinds import fewest_layers
    from engine_hooks.freetoken.virtual import parsed

    kinds = engine.layer_kinds()
    if not kinds:
        raise ModelError("--layers: this model's layers are not kept in one list; check it without")
    if layers >= len(kinds):
        raise ModelError(f"--layers {layers}: the model has {len(kinds)}; check it without")
    if layers < (fewest := fewest_layers(kinds)):
        raise ModelError(
            f"--layers {layers}: of the model's {len(kinds)} layers the first {fewest} have every kind; "
            f"write {fewest} or more"
            if fewest < len(kinds)
            else f"--layers {layers}: the last of the model's {len(kinds)} layers is of its own kind; check it without"
        )
    config = engine.config
    make_shallow(directory, str(config.model_path), layers)
    start = [*engine.pinned(arguments), "--model", str(directory), "--dummy-weight"]
    try:
        read = parsed(start).model_config
    except ModelError as error:
        raise ModelError(f"--layers {layers}: so many make no model; {fewest} may ({error})") from None
    wanted = [
        tuple(each for each in group.layer_ids if each < layers) for group in config.model_config.attention_groups
    ]
    if read.num_layers != layers or [tuple(group.layer_ids) for group in read.attention_groups] != wanted:
        raise ModelError("--layers: the engine reads this model's depth from elsewhere; check it without")
    return start


def _advice(engine: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    adviser = Adviser(
        engine=engine,
        points=[Point(*point) for point in asked["points"]],
        chunk_tokens=asked["chunk_tokens"],
        headroom_bytes=asked["headroom_bytes"],
        margin_bytes=asked["margin_bytes"],
        align=engine.limits().align,
        seconds=0.0,
        run=lambda tokens: (_ for _ in ()).throw(NotImplementedError),
    )
    return [asdict(line) for line in adviser.calculated()]


if __name__ == "__main__":
    # The answers alone go to standard output: whatever a library prints there goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
