"""One record of two halves: what chunks needed in a model's first layers, and what a start with all layers holds."""

from __future__ import annotations

from dataclasses import asdict, replace

from prefill_probe.advice import Point, need_at
from prefill_probe.record import ProbeRecord, Rank, Reduced
from prefill_probe.settings import ProbeSettings, margin_for

# Fields of the record that a virtual GPU gave.
ESTIMATED = ("memory.free_after_graphs_bytes", "memory.headroom_bytes", "memory.boot_peak", "memory.held")


def at_full_depth(
    run: ProbeRecord, plan: ProbeRecord, layers: int, settings: ProbeSettings, *, ratio_governs: bool
) -> ProbeRecord:
    """The verdict on ``plan`` by what ``run`` needed; without advice.

    A chunk's peak is that of its largest layer, so the need of all layers is that of the first that have every kind.

    Args:
        run: of the probe of a start with the first ``layers`` layers, its pools as in ``plan``.
        plan: of a start with all layers on a virtual GPU; nothing was run.
        settings: of the check; ``run`` may have had another margin.
        ratio_governs: whether pools are planned by a share of free memory.
    """
    margin, why = margin_for(settings, wsl=bool(run.gpu.get("wsl")), unified=bool(run.gpu.get("unified")))
    headroom = _headroom(run, plan, ratio_governs)
    verdict = run.verdict if run.verdict in ("fault", "inconclusive") else _verdict(run, headroom, margin)
    depth = int(plan.model["layers"])
    notes = [
        f"run with the first {layers} of {depth} layers and dummy weights; what all {depth} hold, and so the headroom, "
        "is an estimate",
        *([f"margin {margin >> 20} MiB: {why}"] if why else []),
    ]
    free = run.memory.free_before_load_bytes
    held = plan.memory.held
    if held is not None:
        known = sum(asdict(held).values()) - held.other_bytes
        held = replace(held, other_bytes=max(0, free - headroom - known))
    return replace(
        run,
        verdict=verdict,
        model=plan.model | {"dummy_weights": True},
        shapes=run.judged,
        flags=plan.flags,
        reduced=Reduced(layers, depth, list(ESTIMATED)),
        memory=replace(
            run.memory,
            free_after_graphs_bytes=headroom + run.memory.warmed_bytes,
            headroom_bytes=headroom,
            margin_bytes=margin,
            boot_peak=plan.memory.boot_peak,
            held=held,
        ),
        advice=[],
        ranks=[Rank(0, verdict, headroom, run.need.device_bytes if run.need else None)],
        notes=[*notes, *plan.notes, *run.notes],
    )


def _headroom(run: ProbeRecord, plan: ProbeRecord, ratio_governs: bool) -> int:
    """What the plan leaves free, corrected by what was measured in the run.

    Warming up takes the same of both. A context that is larger than the virtual one leaves less before loading; of
    that, pools that are planned by a ratio give up their share.
    """
    missing = plan.memory.free_before_load_bytes - run.memory.free_before_load_bytes
    share = 1 - float(plan.flags.get("--memory-ratio", 0)) if ratio_governs else 1.0
    return plan.memory.free_after_graphs_bytes - run.memory.warmed_bytes - round(share * missing)


def _verdict(run: ProbeRecord, headroom: int, margin: int) -> str:
    if run.verdict == "does-not-fit" or run.need is None or headroom < run.need.device_bytes:
        return "does-not-fit"
    return "fits" if headroom - run.need.device_bytes >= margin else "tight"


def points(run: ProbeRecord) -> list[Point]:
    """Sizes of a chunk and what each needed: single prompts from empty caches, and what the worst shape needs more."""
    plain = {
        each.new_tokens: each.peak.device_bytes
        for each in run.judged
        if each.outcome == "ok" and each.sequences == 1 and not each.cached_tokens and "," not in each.name
    }
    known = [Point(tokens, size) for tokens, size in plain.items()]
    if not known or run.need is None:
        return known
    more = max(0, run.need.device_bytes - need_at(known, run.chunk.effective))
    return [Point(point.tokens, point.need_bytes + more) for point in known]
