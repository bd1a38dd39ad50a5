"""The guard in a whole ``ft serve`` on a virtual GPU, beside a process that takes memory and gives it back."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from machine import Server, prompt_of, server

from prefill_probe.geometry import make_model

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")
MIB = 1 << 20
# The published incident.
INCIDENT = [
    "--max-running-requests", "2", "--cuda-graph-max-bs", "1", "--moe-cache-size", "512", "--memory-ratio", "0.95",
    "--disable-moe-prefill-overlap", "--dummy-weight", "--text-model-only",
]  # fmt: skip


class Neighbour:
    """Another process on the GPU."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.hold(0)

    def hold(self, size: int) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(str(size))
        fresh.replace(self._path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "flash-next-nvfp4", layers=4)


@pytest.fixture
def neighbour(tmp_path: Path) -> Neighbour:
    return Neighbour(tmp_path / "neighbour")


@pytest.fixture
def serve(model: Path, neighbour: Neighbour, tmp_path: Path) -> Any:
    def start(*more: str, **variables: str) -> Any:
        site = os.pathsep.join([str(Path(__file__).parents[1] / "virtual_site"), *filter(None, sys.path)])
        environment = {"VIRTUAL_VRAM": "15.5GiB", "VIRTUAL_NEIGHBOUR": str(tmp_path / "neighbour")}
        environment |= {"PYTHONPATH": site, "HF_HUB_OFFLINE": "1", "PREFILL_PROBE_REPORT": str(tmp_path / "r.json")}
        return server(["--model", str(model), *INCIDENT, *more], environment | variables)

    return start


def completion(one: Server, tokens: int) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of an OpenAI completion that is no stream."""
    body = {"model": "m", "prompt": prompt_of(tokens, tokens), "max_tokens": 2, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{one.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, dict(response.headers), json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


def chunks(one: Server, since: int) -> list[int]:
    """Tokens of the prefill batches that the engine logged after line ``since``, which it may still be writing."""
    time.sleep(1)
    lines = one.text().splitlines()[since:]
    return [int(line.split("#new-token: ")[1].split(",")[0]) for line in lines if "#new-token: " in line]


def counters(path: Path) -> dict[str, float]:
    """The guard's, in the metrics file, as prometheus_client reads it."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(path.read_text(encoding="utf-8"))
    prefix = "prefill_probe_guard_"
    return {f.name[len(prefix) :]: f.samples[0].value for f in families if f.name.startswith(prefix)}


def test_prompts_get_slower_and_then_refused_while_memory_is_short_and_the_server_goes_on(
    serve: Any, neighbour: Neighbour, tmp_path: Path
) -> None:
    metrics = tmp_path / "guard.prom"
    with serve("--max-prefill-length", "2048", "--prefill-probe-metrics", str(metrics)) as one:
        assert one.wait(150, until_ready=True) == "ready", one.text()[-3000:]
        record = json.loads((tmp_path / "r.json").read_text())
        assert set(counters(metrics).values()) == {0}
        need, headroom = record["need"]["device_bytes"], record["memory"]["headroom_bytes"]
        # Short of anything: the request ends, by 503, and says what would be needed; the server does not.
        neighbour.hold(headroom - 2 * MIB)
        status, headers, body = completion(one, 700)
        assert status == 503, body
        assert headers["retry-after"] == "5"
        assert "not enough GPU memory for a prefill chunk of 64 tokens" in json.dumps(body)
        assert one.returncode is None

        # Short of a full chunk: smaller ones, whole units of 64 tokens, and the prompt is answered.
        neighbour.hold(headroom - need + 120 * MIB)
        assert completion(one, 6000)[0] == 200
        shrunk = chunks(one, 0)
        assert sum(shrunk) == 6000
        assert max(shrunk) < 2048
        assert all(tokens % 64 == 0 for tokens in shrunk[:-1])
        assert "guard: 2048 tokens wait and" in one.text()

        # Free again: full chunks within a pass, and nothing is left of what was refused.
        neighbour.hold(0)
        mark = len(one.text().splitlines())
        assert completion(one, 5000)[0] == 200
        assert chunks(one, mark)[:2] == [2048, 2048]
        assert "1 requests refused, 0 misses" in one.text()

        # A fleet sees it too, once the last of it is five seconds old.
        time.sleep(6)
        found = counters(metrics)
        assert (found["requests_refused"], found["misses"]) == (1, 0)
        assert 1 <= found["passes_shrunk"] <= len(shrunk)
        assert found["tokens_delayed"] >= found["passes_shrunk"] * 64


@pytest.mark.slow  # what the guard is for; forty seconds of waiting for an end
def test_without_the_guard_the_same_ends_the_server(serve: Any, neighbour: Neighbour, tmp_path: Path) -> None:
    with serve("--max-prefill-length", "2048", "--prefill-guard", "off") as one:
        assert one.wait(150, until_ready=True) == "ready", one.text()[-3000:]
        record = json.loads((tmp_path / "r.json").read_text())
        neighbour.hold(record["memory"]["headroom_bytes"] - 100 * MIB)
        one.generate(prompt_of(6000, 1), 2, timeout=20)
        assert one.wait(40, until_ready=False) == "ended"


@pytest.mark.slow
def test_a_prefill_that_runs_out_all_the_same_ends_the_server_by_name(serve: Any, tmp_path: Path) -> None:
    runs_out, metrics = tmp_path / "runs-out", tmp_path / "miss.prom"
    with serve(
        "--max-prefill-length", "2048", VIRTUAL_RUNS_OUT=str(runs_out), PREFILL_PROBE_METRICS=str(metrics)
    ) as one:
        assert one.wait(150, until_ready=True) == "ready", one.text()[-3000:]
        record = json.loads((tmp_path / "r.json").read_text())
        assert record["miss"] is None
        assert counters(metrics)["misses"] == 0
        runs_out.touch()
        one.generate(prompt_of(6000, 1), 2, timeout=3)
        health, end = {}, time.monotonic() + 30
        while one.returncode is None and time.monotonic() < end:
            health = one.health() or health
            time.sleep(0.2)
        # As without this package, for another start may well fit; but it says what was predicted.
        assert one.returncode not in (None, 0, 78)
        assert "PrefillOOMError: a prefill chunk ran out of memory although it was predicted to fit." in str(health)
        miss = json.loads((tmp_path / "r.json").read_text())["miss"]
        predicted = re.search(r"predicted +(\d+) MiB at most", miss)
        assert predicted
        assert abs(int(predicted[1]) - record["need"]["device_bytes"] / MIB) < 8
        assert "CUDA out of memory. Tried to allocate" in miss
        assert counters(metrics)["misses"] == 1


@pytest.mark.slow
def test_a_server_that_was_only_warned_survives_the_long_prompt_that_was_to_end_it(serve: Any) -> None:
    with serve("--max-prefill-length", "8192", "--prefill-probe", "warn") as one:
        assert one.wait(200, until_ready=True) == "ready", one.text()[-3000:]
        assert "PrefillOOMError" in one.text()
        assert completion(one, 20000)[0] == 200
        assert one.returncode is None
        assert max(chunks(one, 0)) < 8192
