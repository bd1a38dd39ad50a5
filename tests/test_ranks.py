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
from pathlib import Path
import torch
import torch.distributed as dist
from memory_engine import MIB, MemoryEngine, out_of_memory
from prefill_probe import ProbeSettings, probe
from prefill_probe.record import write_record
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

# The forward's collectives have a communicator of their own, as in an engine.
forward = dist.new_group(backend="gloo")
LAYERS = 3
FAILS = {"before the first collective": 0, "between two collectives": 1, "after the last collective": LAYERS}

class ParallelEngine(MemoryEngine):
    def run(self, shape):
        for layer in range(LAYERS + 1):
            # Once only: what is run next fits.
            if rank == 1 and layer == FAILS.get(where) and not self.shapes:
                self.shapes.append(shape)
                raise out_of_memory(48 * MIB, 24 * MIB)
            if layer < LAYERS:
                dist.all_reduce(torch.ones(1), group=forward)
        return super().run(shape)

def keep(record):
    write_record(record, Path(sys.argv[5]) / f"rank-{rank}.json")
    (Path(sys.argv[5]) / f"rank-{rank}.txt").write_text(str(error_for(record)))

engine = ParallelEngine(headrooms[rank] * MIB, ranks=gather, before_run=before_run, rank=rank)
record = probe(engine, ProbeSettings(margin_bytes=128 * MIB), print, keep)
error = error_for(record)
print(json.dumps({"verdict": record.verdict, "ranks": [r.verdict for r in record.ranks],
                  "error": str(error), "type": type(error).__name__,
                  "runs": [s.new_tokens for s in engine.shapes], "chunk": record.chunk.effective}))
# gloo's threads may end the interpreter's own shutdown with SIGABRT; that is not what is tested.
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def start_ranks(headrooms: list[int], where: str, directory: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(port), json.dumps(headrooms), where, str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        for rank in range(len(headrooms))
    ]


def run_ranks(headrooms: list[int], where: str) -> list[dict[str, object]]:
    workers = start_ranks(headrooms, where, Path())
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


def test_a_rank_that_fails_at_the_end_of_a_chunk_meets_the_others_and_smaller_chunks_are_run() -> None:
    first, second = run_ranks([4096, 4096], "after the last collective")
    assert first["verdict"] == second["verdict"] == "fits"  # a first run's scratch: the repeat of the full chunk fits
    assert len(first["runs"]) > 2  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["before the first collective", "between two collectives"])
def test_a_rank_that_fails_inside_a_forward_ends_by_itself_and_its_record_names_it(where: str, tmp_path: Path) -> None:
    first, second = start_ranks([4096, 4096], where, tmp_path)
    try:
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 78, errors
        record = json.loads((tmp_path / "rank-1.json").read_text())
        assert (record["verdict"], [rank["rank"] for rank in record["ranks"]]) == ("does-not-fit", [1])
        assert [run["outcome"] for run in record["shapes"]] == ["oom"]
        text = (tmp_path / "rank-1.txt").read_text()
        assert "rank 1 failed while the others wait" in text
        assert "allocating 48 MiB with 24 MiB free" in text
    finally:
        first.kill()
        first.communicate()
