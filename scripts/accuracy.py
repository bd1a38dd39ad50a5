#!/usr/bin/env python3
"""docs/accuracy.md from the evidence files: verdicts against requests, the error of the need, cost, and others' ways.

    accuracy.py [--write]

Prints the page. Nothing is measured here; what no evidence file holds is called not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
EVIDENCE = PAGE.parent / "evidence"
MIB = 1 << 20
# As near as this to what requests take, a cell is at the boundary.
NEAR_BYTES = 32 * MIB
VERDICTS = ("fits", "tight", "does-not-fit", "inconclusive", "fault")
LEDGERS = ("allocated_bytes", "device_bytes")
UNMEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """A cell of an evidence file that has a verdict.

    Attributes:
        need: by ledger; None where no full chunk came back.
        observed: what requests took, by ledger; None where one ran out of memory.
        boundary_bytes: what requests took of the device in the ladder's cell with room; None where that is missing.
    """

    name: str
    verdict: str
    served: bool
    headroom_bytes: int
    need: dict[str, int] | None
    observed: dict[str, int] | None
    boundary_bytes: int | None
    case: dict[str, Any]

    @property
    def off_bytes(self) -> int | None:
        """Headroom beyond the boundary; negative: below it."""
        return None if self.boundary_bytes is None else self.headroom_bytes - self.boundary_bytes


def rows_of(document: dict[str, Any]) -> list[Row]:
    """The cells of a matrix, in the file's order."""
    cases = {name: case for name, case in document["cases"].items() if "verdict" in case and not case.get("fresh")}
    boundary = {
        case["ladder"]: case["truth"]["peak"]["device_bytes"]
        for case in cases.values()
        if case["step"] == 0 and case["truth"]["served"]
    }
    return [
        Row(
            name=name,
            verdict=case["verdict"],
            served=case["truth"]["served"],
            headroom_bytes=case["headroom_bytes"],
            need=case["need"] if case["need"] and not case["need"]["estimated"] else None,
            observed=case["truth"].get("peak"),
            boundary_bytes=boundary.get(case["ladder"]),
            case=case,
        )
        for name, case in cases.items()
    ]


def judged(row: Row) -> str:
    """``right``, or what is wrong with a verdict."""
    if row.verdict in ("fits", "tight"):
        return "right" if row.served else {"fits": "false pass", "tight": "tight, and ran out"}[row.verdict]
    if row.verdict == "does-not-fit":
        return "false refusal" if row.served else "right"
    return "no verdict"


def confusion(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """By verdict: how many were served, and how many ran out of memory."""
    counts = Counter((row.verdict, row.served) for row in rows)
    return {verdict: (counts[verdict, True], counts[verdict, False]) for verdict in VERDICTS}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of them lie, linear between two.

    Raises:
        ValueError: no values, or a share outside of 0 to 1.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    ordered, place = sorted(values), share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def errors(rows: Iterable[Row], ledger: str) -> list[float]:
    """(need - observed) / observed, of cells that were served and whose need was run."""
    return [
        row.need[ledger] / row.observed[ledger] - 1
        for row in rows
        if row.need and row.observed and row.observed[ledger] > 0
    ]


def joined(real: Iterable[Row], virtual: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Cells that both have, by name."""
    others = {row.name: row for row in virtual}
    return [(row, others[row.name]) for row in real if row.name in others]


def verdict_of(headroom: int, need: int, margin: int) -> str:
    """What a need that was not run here makes of a headroom."""
    return "does-not-fit" if need > headroom else "fits" if headroom - need >= margin else "tight"


# The page ------------------------------------------------------------------------------------------------------


def _mib(size: float | None) -> str:
    return UNMEASURED if size is None else f"{round(size / MIB, 1) + 0.0:.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:+.2f} %"


def _table(head: Sequence[str], body: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(map(str, line)) + " |" for line in body)]


def spread(values: Sequence[float]) -> list[object]:
    """Number, median, 5th and 95th percentile, and the one farthest from 0."""
    if not values:
        return [0, *[UNMEASURED] * 4]
    shown = (statistics.median(values), percentile(values, 0.05), percentile(values, 0.95), max(values, key=abs))
    return [len(values), *map(_percent, shown)]


SPREAD = ("cells", "median", "5th percentile", "95th percentile", "worst")


def _alone(name: str, document: dict[str, Any]) -> str:
    """What a cell is in a start of its own."""
    case = document["cases"].get(f"{name}, fresh start")
    if case is None or "verdict" not in case:
        return "not run"
    return f"{case['verdict']}, {'served' if case['truth']['served'] else 'out of memory'}"


def _verdicts(rows: list[Row], document: dict[str, Any]) -> list[str]:
    wrong = [row for row in rows if judged(row) != "right"]
    tight = [row for row in rows if row.verdict == "tight" and row.off_bytes is not None]
    near = sum(abs(row.off_bytes or 0) <= NEAR_BYTES for row in tight)
    kinds = Counter(map(judged, rows))
    lines = [
        f"{len(rows)} cells, {kinds['right']} right, {kinds['false pass']} false passes, "
        f"{kinds['false refusal']} false refusals, {kinds['tight, and ran out']} tight that ran out.",
        "",
        *_table(
            ("verdict", "requests served", "out of memory"),
            [(verdict, *counts) for verdict, counts in confusion(rows).items() if any(counts)],
        ),
        "",
        f"Of {len(tight)} `tight` cells {near} are within 32 MiB of what requests took where there was room.",
        "",
    ]
    if not wrong:
        return [*lines, "No cell disagrees.", ""]
    close = sum(row.off_bytes is not None and abs(row.off_bytes) <= NEAR_BYTES for row in wrong)
    body = [
        (row.name, judged(row), _mib(row.headroom_bytes), _mib(row.need and row.need["device_bytes"]),
         _mib(row.boundary_bytes), _mib(row.off_bytes), row.case["truth"].get("at", "served"),
         _alone(row.name, document))
        for row in wrong
    ]  # fmt: skip
    head = (
        "cell",
        "what",
        "headroom",
        "need",
        "requests took, with room",
        "headroom less that",
        "requests",
        "in a start of its own",
    )
    said = f"Those that disagree, {close} of {len(wrong)} within 32 MiB of the boundary; in MiB of the device:"
    return [*lines, said, "", *_table(head, body), ""]


def _boundary(rows: list[Row]) -> list[str]:
    """By ladder: where the verdict changes, and where the requests do."""
    ladders: dict[str, list[Row]] = {}
    for row in rows:
        ladders.setdefault(row.case["ladder"], []).append(row)
    body = []
    for name, cells in ladders.items():
        room = next((row for row in cells if row.case["step"] == 0), None)
        died = max((row.headroom_bytes for row in cells if not row.served), default=None)
        refused = max((row.headroom_bytes for row in cells if row.verdict == "does-not-fit"), default=None)
        served = min((row.headroom_bytes for row in cells if row.served), default=None)
        passed = min((row.headroom_bytes for row in cells if row.verdict in ("fits", "tight")), default=None)
        need = room.need["device_bytes"] if room and room.need else None
        edges = ("none" if size is None else _mib(size) for size in (refused, passed, died, served))
        body.append((name, _mib(need), _mib(room and room.boundary_bytes), *edges))
    head = ("ladder", "need", "requests took", "refused up to", "passed from", "ran out up to", "served from")
    return ["By ladder, in MiB of the device (headroom, but for the first two):", "", *_table(head, body), ""]


def _error(rows: list[Row]) -> list[str]:
    body = [(ledger.removesuffix("_bytes"), *spread(errors(rows, ledger))) for ledger in LEDGERS]
    return [
        "Need over what requests took, less 1, over the cells that were served:",
        "",
        *_table(("ledger", *SPREAD), body),
        "",
    ]


def _again(document: dict[str, Any]) -> list[str]:
    """What engines that ran out of memory hold and need more than at first."""
    cases = document["cases"].values()
    first = {case["ladder"]: case for case in cases if case.get("step") == 0}
    pairs = [(first[case["ladder"]], case) for case in cases if case.get("step") == -1 and case["ladder"] in first]
    lines = ["After all cells of a start, its first one once more:", ""]
    for word, expandable in (("expandable", True), ("whole", False)):
        some = [(a, b) for a, b in pairs if b["expandable"] is expandable]
        holds = max((abs(b["idle_allocated_bytes"] - a["idle_allocated_bytes"]) for a, b in some), default=0)
        needs = max((abs(b["need"]["allocated_bytes"] - a["need"]["allocated_bytes"]) for a, b in some), default=0)
        lines.append(
            f"- segments {word}, {len(some)} starts: what the engine holds differs by {holds} bytes at most, and the "
            f"allocated need by {needs} bytes"
        )
    lines += ["", "Of whole segments a block is up to 1 MiB larger than what was asked for."]
    ended = [name for name, case in document["cases"].items() if not case["ok"]]
    return [*lines, *([f"Not finished: {', '.join(ended)}."] if ended else []), ""]


def fresh_pairs(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Cells that were run in a start of their own as well: (resized, fresh)."""
    cases = document["cases"]
    pairs = [(cases.get(name.removesuffix(", fresh start")), case) for name, case in cases.items() if case.get("fresh")]
    return [(resized, case) for resized, case in pairs if resized and "verdict" in resized]


def _fresh(document: dict[str, Any]) -> list[str]:
    pairs = fresh_pairs(document)
    if not pairs:
        return ["None of these cells was compared with a start of its own (`--fresh`).", ""]
    verdicts = sum(a["verdict"] == b["verdict"] for a, b in pairs)
    truths = sum(a["truth"]["served"] == b["truth"]["served"] for a, b in pairs)
    more = [b["start_left_bytes"] - a["headroom_bytes"] for a, b in pairs if a["visible_gib"]]
    needs = [
        abs(a["need"]["allocated_bytes"] - b["need"]["allocated_bytes"])
        for a, b in pairs
        if all(each["need"] and not each["need"]["estimated"] for each in (a, b))
    ]
    least, most = (_mib(edge(more, default=None)) for edge in (min, max))
    return [
        f"{len(pairs)} of these cells were run again in a start of their own, with its flags, on a card of its size: "
        f"{verdicts} have the same verdict and {truths} the same truth at the same headroom, and the allocated need "
        f"differs by {_mib(max(needs, default=None))} MiB at most. Such a start left {least} to "
        f"{most} MiB more than pools that are made anew, which was held as well.",
        "",
    ]


def _matrix(title: str, name: str, documents: dict[str, Any]) -> list[str]:
    document, lines = documents.get(name), [f"## {title}", ""]
    if document is None:
        return [*lines, f"Not measured: there is no docs/evidence/{name}.json.", ""]
    rows = rows_of(document)
    gpus = sorted({case["versions"].get("gpu", "no GPU") for case in document["cases"].values()})
    engines = sorted({case["versions"].get("freetoken", "unknown") for case in document["cases"].values()})
    lines += [f"[{name}.json](evidence/{name}.json): FreeToken {', '.join(engines)}, {', '.join(gpus)}.", ""]
    return [*lines, *_verdicts(rows, document), *_error(rows), *_again(document), *_fresh(document), *_boundary(rows)]


def _virtual(documents: dict[str, Any]) -> list[str]:
    lines = ["## The virtual GPU against a real one", ""]
    if "matrix" not in documents or "matrix-virtual" not in documents:
        return [*lines, "Not measured: it takes both files.", ""]
    pairs = joined(rows_of(documents["matrix"]), rows_of(documents["matrix-virtual"]))
    body = []
    for ledger in LEDGERS:
        values = [v.need[ledger] / r.need[ledger] - 1 for r, v in pairs if v.need and r.need and r.need[ledger] > 0]
        body.append((ledger.removesuffix("_bytes"), *spread(values)))
    same = sum(r.verdict == v.verdict for r, v in pairs)
    asked = [
        (verdict_of(r.headroom_bytes, v.need["device_bytes"], r.case["margin_bytes"]), r) for r, v in pairs if v.need
    ]
    right = sum((verdict != "does-not-fit") == r.served for verdict, r in asked)
    return [
        *lines,
        "Cells of the same name. The need on the virtual GPU over the real one, less 1:",
        "",
        *_table(("ledger", *SPREAD), body),
        "",
        f"The verdicts of {same} of {len(pairs)} cells are the same, each on its own headroom. The virtual need held "
        f"against the real headroom agrees with the requests in {right} of {len(asked)} cells.",
        "",
    ]


def _cost(documents: dict[str, Any]) -> list[str]:
    cases = documents.get("incident", {"cases": {}})["cases"]
    cost = cases.get("cost_2048", {})
    pairs = cost.get("pairs", [])
    seconds = [pair["enforce"]["probe_seconds"] for pair in pairs]
    first = cost.get("first_over_second_with_probe", [])
    without = [round(p["off"]["first_seconds"] / p["off"]["second_seconds"], 3) for p in pairs]
    advised = [
        f"{record['timings']['oom_to_advice_seconds']} s ({name})"
        for name, case in cases.items()
        if "oom_to_advice_seconds" in ((record := case.get("record") or {}).get("timings") or {})
    ]

    def each(values: Sequence[float], unit: str = "") -> str:
        return ", ".join(f"{value}{unit}" for value in values) or UNMEASURED

    body = [
        ("the probe itself", each(seconds, " s"), ""),
        ("start to the end of the first full chunk, with the probe over without, warm Triton caches",
         f"{each(cost.get('ratio_boot_plus_first', []))}; median {cost.get('median_ratio', UNMEASURED)}",
         "1.02; the first pair's probed start was the machine's first"),
        ("the same, cold Triton caches", UNMEASURED, "1.02"),
        ("first full chunk over the second, with the probe", each(first), ""),
        ("the same without it", each(without), ""),
        ("first token of the first request over that without the probe, cold Triton caches",
         UNMEASURED, "0.5"),
        ("from the first out-of-memory error to advice", ", ".join(advised) or UNMEASURED, ""),
    ]  # fmt: skip
    return [
        "## What it costs",
        "",
        "From the case `cost_2048` of [incident.json](evidence/incident.json), where it is not said otherwise.",
        "",
        *_table(("", "measured", "goal"), body),
        "",
    ]


PEERS = [
    ("this probe", "`prefill_probe`, `probe`", "a chunk by the engine's own scheduler, several shapes", "random",
     "at full size", "the deepest the pools admit", "after pools and graphs, before serving"),
    ("vLLM", "`vllm/v1/worker/gpu_model_runner.py`, `GPUModelRunner.profile_run`; "
     "`vllm/v1/worker/gpu/model_runner.py`, `profile_run`; "
     "`vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py`, `_warmup_prefill_kernels`",
     "`max_num_batched_tokens`, without attention metadata", "reported as zeros (issue 57270)",
     "64 tokens (issues 52872, 54775)", "none: attention is left out", "before the pools, to size them"),
    ("TGI", "`server/text_generation_server/models/flash_causal_lm.py`, `FlashCausalLM.warmup`; "
     "`backends/v3/src/client/grpc_client.rs`, `warmup`",
     "`max_batch_prefill_tokens`, in prompts of the longest input", "one word, over and over",
     "no such model was looked at", "0", "before the pools; they get a share of what is left then"),
    ("LightLLM", "`lightllm/common/basemodel/basemodel.py`, `_check_max_len_infer`",
     "`batch_max_tokens`, one prompt", "all 1", "at full size, one prompt", "0",
     "after pools and graphs; names three flags, no values"),
    ("SGLang", "`python/sglang/srt/server_args.py`, `ServerArgs._handle_gpu_memory_settings`",
     "none: 512 MiB, 1.5 MiB for each token of max(chunk, 2048), 2 MiB for each graph's sequence, "
     "at least 10 GiB on cards above 60 GiB", "-", "the same formula", "-", "before loading"),
    ("TensorRT-LLM", "`tensorrt_llm/_torch/pyexecutor/_util.py`, `KvCacheCreator._create_dummy_context_requests` and "
     "`configure_kv_cache_capacity`", "`max_num_tokens`, in prompts of the longest input", "random",
     "at full size", "0", "with small pools, to size the real ones; peaks before it are reset (pull request 18669)"),
]  # fmt: skip
# By what the evidence calls it: what it stands for.
SHORTCUTS = {
    "position 0 alone": "one prompt from empty caches",
    "GDN at 64 tokens": "GDN at 64 tokens",
    "token id 0 alone": "token id 0 alone",
    "128 tokens": "the engine's own warm-up, 128 tokens",
}


def _shortcuts(title: str, name: str, documents: dict[str, Any]) -> list[str]:
    document = documents.get(name)
    if document is None:
        return [f"{title}: not measured.", ""]
    body, first = [], dict[str, int]()
    for row in rows_of(document):
        runs = row.case.get("shortcuts")
        if not runs or row.need is None:
            continue
        need = row.need["allocated_bytes"]
        missed = [_mib(need - run["allocated_bytes"] if (run := runs.get(word)) else None) for word in SHORTCUTS]
        formula = 1.5 * MIB * max(row.case["chunk"], 2048)
        body.append((row.case["ladder"], _mib(need), *missed, _mib(need - formula)))
        cold = runs.get("first run of the process")
        if cold and runs["position 0 alone"]:
            more = cold["device_bytes"] - runs["position 0 alone"]["device_bytes"]
            first[f"{row.case['geometry']}, chunk {row.case['chunk']}"] = more
    head = ("ladder", "need", *SHORTCUTS.values(), "1.5 MiB a token")
    return [
        f"{title}, MiB of the allocated ledger that each would have missed (negative: reserved too much):",
        "",
        *_table(head, body),
        "",
        "Peaks that are reset after a warm-up lose what a first run took more than later ones, MiB of the device: "
        + ("; ".join(f"{where}: {_mib(size)}" for where, size in first.items() if size) or "none in these starts")
        + ("." if name == "matrix" else ". Nothing is loaded, compiled or tuned on a virtual GPU."),
        "",
    ]


HEAD = """# How right the verdict is, and what it costs

Written by `scripts/accuracy.py --write` from the files in docs/evidence; not to be edited. `scripts/acceptance matrix`
writes the two that this page is about; on your own card `scripts/acceptance matrix --quick` takes minutes.

A **cell** is one configuration: model geometry with 4 layers and dummy weights, `--max-running-requests`, allocator
segments, chunk, pools and headroom. Cells that differ in their headroom alone are a **ladder**: the first has room,
which gives the need, and the others get headroom of 0.9 to 1.3 of it, most of it by choice of the ratio with which the
pools are planned and the rest by a process beside the engine. One start serves many cells: before each, the engine's
own `rebuild_cache` makes pools, page table, free lists, prefix tree and graphs anew, also after a cell that ran out of
memory. Kernels stay loaded, so what only a first run takes is seen in the first cell of a start alone.

**Truth** is what requests do in that state: a prompt of five chunks, a burst of short ones that fill a chunk, a
deep one behind a cached prefix while others generate, all three times, through the scheduler's own loop. They are all
served, or one raises an out-of-memory error.

`tight` is the word of the specification: the chunk fits, and less than the margin (128 MiB) remains. A `tight` cell
must be served like one that `fits`; one that is not counts as a disagreement here, however near. The boundary of a
ladder is what requests took in its cell with room, which may be more than they need: an allocator that is short of
memory gives back what it keeps and tries again. The goal is no false pass and no false refusal, and no `tight` cell
that runs out more than 32 MiB from the boundary.
"""


def page_of(documents: dict[str, Any]) -> str:
    """The text of docs/accuracy.md; ``documents``: the evidence files by name."""
    lines = [
        HEAD,
        *_matrix("On a GPU", "matrix", documents),
        *_matrix("On the virtual GPU", "matrix-virtual", documents),
        "Kernels do nothing there, and every allocation is counted: a cell shows whether verdict and requests agree "
        "about the same allocator, not what a card does.",
        "",
        *_virtual(documents),
        *_cost(documents),
        "## What others would have run",
        "",
        "Read in their sources. For which models they were written is not the question here, but what their way would "
        "see.",
        "",
        *_table(("", "where", "tokens", "ids", "recurrent layers", "tokens before them", "when"), PEERS),
        "",
        "What such a way misses was measured in the cells with room, by runs of this engine that leave the same out.",
        "",
        *_shortcuts("On a GPU", "matrix", documents),
        *_shortcuts("On the virtual GPU", "matrix-virtual", documents),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def documents_in(directory: Path) -> dict[str, Any]:
    """The evidence files by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/accuracy.md")
    page = page_of(documents_in(EVIDENCE))
    if parser.parse_args().write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page, end="")


if __name__ == "__main__":
    sys.exit(main())
