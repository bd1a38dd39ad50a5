"""A server under load beside a process that takes GPU memory and gives it back (``scripts/acceptance guard``)."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import QUICK, REPOSITORY, Ballast, Server, server

GIB = 1 << 30
VISIBLE = int(15.5 * GIB)
FLAGS = [
    "--max-running-requests", "8", "--cuda-graph-max-bs", "4", "--moe-cache-size", "512", "--memory-ratio", "0.85",
    "--max-prefill-length", "8192", "--disable-moe-prefill-overlap", "--dummy-weight", "--text-model-only",
]  # fmt: skip
CLIENTS = 8
# A request that takes longer than this hangs.
HANGS_SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """One prompt: ``shared`` words that others begin with too, and ``own`` ones."""

    number: int
    shared: int
    own: int
    leaves_after: float | None  # seconds after which the client goes away

    def text(self) -> str:
        from prefill_probe.geometry.tokenizer import WORDS, words

        common, own = random.Random(7), random.Random(1000 + self.number)
        return words(
            [*(common.randrange(WORDS) for _ in range(self.shared)), *(own.randrange(WORDS) for _ in range(self.own))]
        )


def prompts(count: int, longest: int) -> list[Asked]:
    """The same for a count: 50 tokens to ``longest``, a third with a shared prefix, a tenth left by its client."""
    pick = random.Random(count)
    found = []
    for number in range(count):
        own = int(50 * (longest / 50) ** pick.random())
        shared = pick.choice((0, 0, min(4096, longest // 2)))
        found.append(Asked(number, shared, own, pick.uniform(0.1, 2.0) if pick.random() < 0.1 else None))
    return found


@dataclass
class Outcome:
    """What became of the prompts, by (turn, number): status (0: the client left, -1: it hung, -2: no server), text."""

    statuses: dict[tuple[int, int], int] = field(default_factory=dict)
    texts: dict[tuple[int, int], str] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """How many ended by each status."""
        found: dict[str, int] = {}
        for status in self.statuses.values():
            found[str(status)] = found.get(str(status), 0) + 1
        return found


def ask(one: Server, asked: Asked) -> tuple[int, str]:
    """One completion that is no stream."""
    body = {"model": "m", "prompt": asked.text(), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{one.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=asked.leaves_after or HANGS_SECONDS) as response:
            return response.status, json.load(response)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")[:300]
    except (TimeoutError, OSError) as error:
        late = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
        return ((0 if asked.leaves_after else -1), "") if late else (-2, repr(error))


def load(one: Server, work: list[Asked], more: Callable[[], bool] = lambda: False) -> Outcome:
    """``CLIENTS`` clients share the work, and begin it again as long as there is to be ``more``."""
    outcome, lock = Outcome(), threading.Lock()
    turns = itertools.count(1)
    left = [(0, asked) for asked in work]

    def client() -> None:
        while True:
            with lock:
                if not left and more():
                    turn = next(turns)
                    left.extend((turn, asked) for asked in work)
                if not left or one.returncode is not None:
                    return
                turn, asked = left.pop(0)
            key = (turn, asked.number)
            outcome.statuses[key], outcome.texts[key] = ask(one, asked)

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return outcome


class Pressure:
    """Memory taken and given back at random until ``stop``; ``hold(share)`` leaves that share of what can be had."""

    def __init__(self, hold: Callable[[float], None]) -> None:
        self.times = 0
        self._hold = hold
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        pick = random.Random(3)
        while not self._stop.is_set():
            self._hold(pick.choice((0.0, pick.random(), pick.random(), 1.0)))
            self.times += 1
            self._stop.wait(pick.uniform(0.2, 2.8))
        self._hold(1.0)

    def stop(self) -> None:
        """All memory is given back when this returns."""
        self._stop.set()
        self._thread.join()


class Bench:
    """A model, and a card on which other processes can be had: a real one, or a virtual one."""

    def __init__(self, directory: Path, geometry: str, *, virtual: bool) -> None:
        from prefill_probe.geometry import make_model

        self.model = make_model(directory / "model", geometry, layers=4)
        self.report = directory / "record.json"
        self._virtual = directory / "neighbour" if virtual else None
        self.environment = {"PREFILL_PROBE_REPORT": str(self.report), "PYTHONPATH": QUICK}
        if self._virtual is not None:
            self._virtual.write_text("0")
            self.environment |= {"PYTHONPATH": str(REPOSITORY / "tests" / "virtual_site"), "HF_HUB_OFFLINE": "1"}
            self.environment |= {"VIRTUAL_VRAM": f"{VISIBLE}B", "VIRTUAL_NEIGHBOUR": str(self._virtual)}
        self.ballast = None if virtual else Ballast(VISIBLE)

    def start(self, *more: str) -> Any:
        """A server, to be used in a ``with``."""
        return server(["--model", str(self.model), *FLAGS, *more], self.environment)

    def hold(self, share: float) -> None:
        """Leave ``share`` of the headroom that the server has; 1: all of it."""
        headroom = json.loads(self.report.read_text(encoding="utf-8"))["memory"]["headroom_bytes"]
        if self._virtual is not None:
            fresh = self._virtual.with_suffix(".new")
            fresh.write_text(str(int((1 - share) * headroom)), encoding="utf-8")
            fresh.replace(self._virtual)
        elif self.ballast is not None:
            self.ballast.take(int((1 - share) * headroom))

    def give_room(self) -> None:
        """Hold nothing of the card any more."""
        if self.ballast is not None:
            self.ballast.hold(1 << 60)

    def close(self) -> None:
        """Give the card back."""
        if self.ballast is not None:
            self.ballast.close()


def _lines_at_rest(one: Server) -> int:
    """Lines of its log once it writes no more: what clients left behind is done with."""
    for _ in range(40):
        before = len(one.text().splitlines())
        time.sleep(1.5)
        if len(one.text().splitlines()) == before:
            break
    return before


def under_pressure(bench: Bench, guard: str, work: list[Asked], changes: int) -> dict[str, Any]:
    """The load until memory changed so often, a full chunk right after it, and the prompts again without pressure.

    The engine checks at every idle moment that all pages, slots and rows are back (``check_integrity``), and ends if
    one is not.
    """
    with bench.start("--prefill-guard", guard) as one:
        if one.wait(240, until_ready=True) != "ready":
            return {"ok": False, "log_tail": one.text().splitlines()[-40:]}
        began, pressure = time.monotonic(), Pressure(bench.hold)
        disturbed = load(one, work, lambda: pressure.times < changes)
        seconds = time.monotonic() - began
        pressure.stop()
        alive = one.returncode is None
        result: dict[str, Any] = {
            "guard": guard,
            "seconds": round(seconds, 1),
            "changes_of_memory": pressure.times,
            "statuses": disturbed.counts(),
            "server_alive": alive,
        }
        counters = re.findall(r"since the start: ([^\"\n]*misses)", one.text())
        result["counters"] = counters[-1] if counters else ""
        if alive:
            mark = _lines_at_rest(one)
            ask(one, Asked(10**6, 0, 20000, None))
            time.sleep(1)
            chunks = [
                int(found) for found in re.findall(r"#new-token: (\d+)", "\n".join(one.text().splitlines()[mark:]))
            ]
            result["first_chunk_afterwards"] = chunks[0] if chunks else None
            answered = [key for key, status in disturbed.statuses.items() if status == 200]
            numbers = {number for _, number in answered}
            quiet = load(one, [asked for asked in work if asked.number in numbers])
            same = [quiet.texts[0, number] == disturbed.texts[turn, number] for turn, number in answered]
            result |= {"answered": len(answered), "same_as_undisturbed": sum(same)}
            result["distinct_answers"] = len(set(quiet.texts.values()))
            if not all(same):
                # Where chunks end changes numerics: once more undisturbed, in another order, so with other chunks.
                other = load(one, [asked for asked in reversed(work) if asked.number in numbers])
                agree = {number: other.texts[0, number] == quiet.texts[0, number] for number in numbers}
                unequal = sum(not agree[number] for _, number in answered)
                result |= {"two_undisturbed_runs_differ_in": unequal, "differ_in": len(same) - sum(same)}
                result["differ_only_where_undisturbed_runs_do"] = result["differ_in"] <= unequal
            time.sleep(1)
            idle = "\n".join(one.text().splitlines()[mark:]).count("Scheduler is idle")
            result |= {"idle_checks_afterwards": idle, "server_alive": one.returncode is None}
        result["ok"] = (
            result["server_alive"]
            and set(result["statuses"]) <= {"200", "503", "0"}
            and result["first_chunk_afterwards"] == 8192
            and result["idle_checks_afterwards"] > 0
            and pressure.times >= changes
            and result.get("differ_only_where_undisturbed_runs_do", True)
        )
        if not result["ok"]:
            result["log_tail"] = one.text().splitlines()[-120:]
        return result


# For two servers at once; beside them the pools are the same with and without the guard.
ROOMY = ["--num-tokens", "196608"]


def throughput(bench: Bench, count: int, longest: int, pairs: int) -> dict[str, Any]:
    """Seconds for the same prompts, guard on and off in turn, without pressure: by two servers, one of them idle."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    work = [Asked(each.number, 0, each.own, None) for each in prompts(count, longest)]
    bench.give_room()
    with bench.start("--prefill-guard", "on", *ROOMY) as on, bench.start("--prefill-guard", "off", *ROOMY) as off:
        servers = {"on": on, "off": off}
        for one in servers.values():
            if one.wait(300, until_ready=True) != "ready":
                return {"ok": False, "log_tail": one.text().splitlines()[-40:]}
        for turn in range(pairs + 1):
            for guard in ("on", "off") if turn % 2 else ("off", "on"):
                # Prompts of their own for each turn: what a server knows already it does not prefill.
                own = [Asked(1000 * turn + each.number, 0, each.own, None) for each in work]
                began = time.monotonic()
                load(servers[guard], own)
                if turn:  # the first is warm-up
                    seconds[guard].append(round(time.monotonic() - began, 3))
    ratios = [round(off / on, 4) for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "seconds": seconds,
        "prompts": count,
        "tokens": sum(each.own for each in work),
        "throughput_on_over_off": ratios,
        "median": round(statistics.median(ratios), 4),
        "ok": statistics.median(ratios) >= 0.995,
    }


def run(options: Any, evidence: Any) -> int:
    """``scripts/acceptance guard``."""
    failed = 0
    work = prompts(options.requests, options.longest)
    cases: dict[str, Callable[[Bench], dict[str, Any]]] = {
        "guard on": lambda bench: under_pressure(bench, "on", work, options.changes),
        # For comparison: what happens is recorded, whatever it is.
        "guard off": lambda bench: under_pressure(bench, "off", work, options.changes) | {"ok": True},
        "throughput": lambda bench: throughput(bench, 40, options.longest, options.pairs),
    }
    chosen = options.only.split(",") if options.only else list(cases)
    for geometry in options.geometries.split(","):
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(Path(directory), geometry, virtual=options.virtual)
            try:
                for case in chosen:
                    name = f"{geometry}, {case}"
                    try:
                        result = cases[case](bench)
                    except Exception as error:
                        result = {"ok": False, "error": repr(error)}
                    failed += not result["ok"]
                    evidence.add(name, result)
                    print(f"{name}: {'ok' if result['ok'] else 'FAILED'}", flush=True)
            finally:
                with contextlib.suppress(Exception):
                    bench.close()
    return 1 if failed else 0
