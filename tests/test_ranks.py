"""Tensor parallelism: real processes over gloo, one with less memory than the other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

WORKER = """
import json, os, sys
import torch.distributed as dist
from memory_engine import MIB, MemoryEngine
from prefill_probe import ProbeSettings, probe
from prefill_probe.render.text import error_for
rank, port, headrooms, where = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(headrooms))

def gather(value):
    values = [None] * len(headrooms)
    dist.all_gather_object(values, value)
    return values

def before_run(number, shape):
    if where == "middle" and rank == 1 and number == 2:
        engine.headroom = 100 * MIB      # the second run of the full chunk fails on this rank alone
    if where == "fault" and rank == 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

engine = MemoryEngine(headrooms[rank] * MIB, ranks=gather, before_run=before_run)
record = probe(engine, ProbeSettings(margin_bytes=128 * MIB))
error = error_for(record)
print(json.dumps({"verdict": record.verdict, "ranks": [r.verdict for r in record.ranks],
                  "error": str(error), "type": type(error).__name__,
                  "runs": [s.new_tokens for s in engine.shapes], "chunk": record.chunk.effective}))
# gloo's threads may end the interpreter's own shutdown with SIGABRT; that is not what is tested.
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def run_ranks(headrooms: list[int], where: str) -> list[dict[str, object]]:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(port), json.dumps(headrooms), where],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        for rank in range(len(headrooms))
    ]
    outputs = [worker.communicate(timeout=90) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_one_rank_with_less_memory_stops_both_with_the_same_error_that_names_it() -> None:
    first, second = run_ranks([4096, 600], "start")
    assert first["verdict"] == second["verdict"] == "does-not-fit"
    assert first["error"] == second["error"]
    assert "rank 1" in str(first["error"])
    assert first["type"] == "PrefillOOMError"
    assert first["ranks"] == second["ranks"]


@pytest.mark.parametrize("where", ["start", "middle", "fault"])
def test_ranks_run_the_same_shapes_in_lockstep_wherever_one_fails(where: str) -> None:
    first, second = run_ranks([4096, 600 if where == "start" else 4096], where)
    assert first["runs"] == second["runs"]
    assert first["verdict"] == second["verdict"] != "fits"


def test_ranks_that_all_fit_serve() -> None:
    first, second = run_ranks([4096, 3000], "none")
    assert first["verdict"] == second["verdict"] == "fits"
    assert first["ranks"] == ["fits", "fits"]
