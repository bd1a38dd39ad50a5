"""FreeTokenEngine: a booted FreeToken scheduler as the probe's ``Engine``."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import platform
import traceback
from pathlib import Path
from typing import Any, TypeVar

from engine_hooks.freetoken.planner import Planner, PlannerTap
from engine_hooks.freetoken.sites import site_of
from engine_hooks.freetoken.state import Before
from prefill_probe.engine import Budget, Geometry, Identity
from prefill_probe.faults import classify
from prefill_probe.meter import CudaMeter, Meter
from prefill_probe.shape import Limits, Sequence, Shape, full_chunk

T = TypeVar("T")

# Token ids of the synthetic prompt: drawn over the whole vocabulary, always the same.
SEED = 20260101
# GDN kernels work in chunks of 64 tokens (freetoken.kernel.fla.chunk.CHUNK_SIZE).
GDN_CHUNK = 64
# Ids of the probe's requests: no client has a negative one.
_UID = -1000


class FreeTokenEngine:
    """The Engine protocol over a ``Scheduler`` that has just been built and has served nothing.

    Args:
        scheduler: at the end of its ``__init__``.
        noted: what the planner was asked while it booted.
    """

    def __init__(self, scheduler: Any, noted: PlannerTap) -> None:
        self._scheduler = scheduler
        self._planner = Planner(scheduler.engine, noted)
        self._given = noted.given
        self._device = scheduler.device
        self._before = Before(scheduler)
        self._issued: list[int] = []
        # The error behind a fault, for whoever raises it again; never one that holds tensors.
        self.last_fault: BaseException | None = None
        # Whether a run could not be undone: the engine must not serve then, in no mode.
        self.damaged = False
        self.meter: Meter = CudaMeter(scheduler.device)
        self.rank = int(scheduler.config.tp_info.rank)

    # What it is ------------------------------------------------------------------------------------------------

    def identity(self) -> Identity:
        return self._identity

    @functools.cached_property
    def _identity(self) -> Identity:
        config = self._scheduler.config
        model = config.model_config
        return Identity(
            engine={"name": "freetoken", "version": _version("freetoken")},
            model={
                "path": str(config.model_path),
                "architecture": (getattr(config.hf_config, "architectures", None) or ["unknown"])[0],
                "layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "experts": getattr(model, "num_experts", 0) or 0,
                "experts_per_token": getattr(model, "num_experts_per_tok", 0) or 0,
                "quantization": _quantization(model),
                "dummy_weights": bool(config.use_dummy_weight),
            },
            gpu=_gpu(self._device),
            flags=self._flags(),
            versions={name: _version(name) for name in ("torch", "triton", "transformers", "flashlib", "prefill-probe")}
            | {"python": platform.python_version()},
        )

    def _flags(self) -> dict[str, Any]:
        """The engine's flags that bear on memory, as they ended up, and without those left at their default."""
        config = self._scheduler.config
        values = {
            "--memory-ratio": config.memory_ratio,
            "--max-prefill-length": self._given["max_extend_tokens"],
            "--max-running-requests": config.max_running_req,
            "--num-pages": self._given["num_page_override"],
            "--num-tokens": self._given["num_token_override"],
            "--moe-cache-size": self._given["moe_cache_size"] or None,
            "--moe-cache-rate": self._given["moe_cache_rate"],
            "--moe-cache-auto": self._given["moe_cache_auto"] or None,
            "--cuda-graph-max-bs": config.cuda_graph_max_bs,
            "--max-seq-len-override": config.max_seq_len_override,
            "--page-size": config.page_size,
            "--cache-type": config.cache_type,
            "--attention-backend": config.attention_backend,
            "--moe-prefill-overlap": config.moe_prefill_overlap,
            "--tensor-parallel-size": config.tp_info.size,
        }
        return {flag: value for flag, value in values.items() if value is not None}

    def limits(self) -> Limits:
        scheduler = self._scheduler
        engine, config, cache = scheduler.engine, scheduler.config, scheduler.cache_manager
        sequences = min(config.max_running_req, len(scheduler.table_manager._free_slots))
        if cache.is_hybrid:
            # A hybrid request owns one live state slot and two for snapshots.
            sequences = min(sequences, engine.linear_state_pool.num_free_slots // 3)
        requested = int(self._given["max_extend_tokens"])
        budget = int(scheduler.prefill_budget)
        return Limits(
            requested_chunk=requested,
            budget=budget,
            budget_capped_by="the window pool" if budget < requested else "",
            # 0.1.2 does not align chunk ends.
            align=math.lcm(GDN_CHUNK, int(getattr(cache, "prefill_chunk_align", 1))),
            longest_prompt=int(engine.max_seq_len) - 1,
            max_sequences=sequences,
            page_tokens=int(cache.page_size),
            kv_pages=int(engine.num_pages),
        )

    def budget(self) -> Budget:
        return self._planner.budget()

    def plan(self, memory_ratio: float) -> Geometry:
        return self._planner.plan(memory_ratio)

    # What it runs ----------------------------------------------------------------------------------------------

    def run(self, shape: Shape) -> Shape:
        """One prefill pass, as ``Scheduler.overlap_loop`` runs it: admission, preparation, restore, forward, sampler.

        Only what speaks to clients is left out. Whatever the outcome, everything that the pass took is given back.
        """
        import torch
        from freetoken.env import ENV

        self._issued = []
        if any(sequence.cached_tokens for sequence in shape.sequences):
            raise ValueError("shapes with cached tokens cannot be run yet")
        scheduler = self._scheduler
        self._before.keep_rows(len(shape.sequences))
        _load_prefix_compare()
        reqs: list[Any] = []
        try:
            with torch.inference_mode():
                if ENV.DISABLE_OVERLAP_SCHEDULING:
                    with torch.cuda.stream(scheduler.engine.stream):
                        self._pass(shape, reqs)
                else:
                    self._pass(shape, reqs)
            return self.issued(shape)
        except Exception as error:
            self.last_fault = None if classify(error).is_memory else error
            traceback.clear_frames(error.__traceback__)  # they hold the chunk's tensors
            raise
        finally:
            self.damaged = True
            torch.cuda.synchronize(self._device)
            with torch.inference_mode():
                self._before.restore(reqs)
            self.damaged = False

    def issued(self, shape: Shape) -> Shape:
        """What the scheduler made of ``shape`` when it was last run, also if that run failed later."""
        issued = tuple(Sequence(0, length) for length in self._issued)
        return Shape(shape.name, issued) if issued and issued != shape.sequences else shape

    def _pass(self, shape: Shape, reqs: list[Any]) -> None:
        scheduler = self._scheduler
        engine = scheduler.engine
        for request in self._requests(shape):
            scheduler.prefill_manager.add_one_req(request)
        scheduler.stream.wait_stream(engine.stream)
        batch = scheduler.prefill_manager.schedule_next_batch(scheduler.prefill_budget)
        if batch is None:
            raise RuntimeError(f"the scheduler admitted no request of {shape}")
        reqs += batch.reqs
        self._issued = [req.extend_len for req in batch.reqs]
        forward_input = scheduler._prepare_batch(batch)
        with scheduler.engine_stream_ctx:
            engine.stream.wait_stream(scheduler.stream)
            scheduler._restore_linear_states(batch)
            output = scheduler._forward(forward_input)
        output.copy_done_event.synchronize()

    def _requests(self, shape: Shape) -> list[Any]:
        """Requests as the API server would send them.

        The full chunk is sampled as a request that names nothing is, by the checkpoint's own defaults; smaller chunks
        greedily, so that both paths of the sampler that requests will take are loaded, and no other.
        """
        import torch
        from freetoken.core import SamplingParams
        from freetoken.message import UserMsg

        full = shape.new_tokens >= full_chunk(self.limits()).new_tokens
        sampling = self._default_sampling() if full else {"temperature": 0.0}
        generator = torch.Generator().manual_seed(SEED)
        vocabulary = int(self._scheduler.config.model_config.vocab_size)
        return [
            UserMsg(
                uid=_UID - number,
                input_ids=torch.randint(vocabulary, (sequence.new_tokens,), generator=generator, dtype=torch.int32),
                sampling_params=SamplingParams(**sampling, max_tokens=1),
            )
            for number, sequence in enumerate(shape.sequences)
        ]

    def _default_sampling(self) -> dict[str, Any]:
        """What the API server fills in for a request that says nothing of sampling."""
        from freetoken.utils import load_generation_sampling

        config = self._scheduler.config
        if config.use_dummy_weight or getattr(config, "sampling_defaults", "model") != "model":
            return {"temperature": 0.0}
        given = load_generation_sampling(config.model_path)
        return {name: given[name] for name in ("temperature", "top_k", "top_p") if name in given}

    def site(self, error: BaseException) -> str:
        return site_of(error)

    def gather(self, value: T) -> list[T]:
        size = self._scheduler.config.tp_info.size
        if size == 1:
            return [value]
        import torch.distributed

        values: list[Any] = [None] * size
        torch.distributed.all_gather_object(values, value, group=self._scheduler.engine.tp_cpu_group)
        return values

    def settle(self) -> None:
        """Give the allocator's cache back to the device, and forget the probe's peaks."""
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self.meter.forget_peaks()


@functools.cache
def _load_prefix_compare() -> None:
    """Load the engine's C++ prefix comparison, which is built when first used (measured: 1.9 s, by the first request).

    It needs no GPU memory, and what cannot be loaded is the first request's business, not the verdict's.
    """
    import torch
    from freetoken.kernel import fast_compare_key

    ids = torch.zeros(2, dtype=torch.int32)
    with contextlib.suppress(Exception):
        fast_compare_key(ids, ids)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _quantization(model: Any) -> str:
    experts = getattr(model, "expert_quant", "none")
    if experts in (None, "none"):
        experts = getattr(model, "moe_weight_format", None) or "none"
    return str(experts)


def _gpu(device: Any) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": properties.total_memory,
        "driver": _driver(),
        "wsl": "microsoft" in platform.release().lower(),
        "unified": bool(getattr(properties, "is_integrated", False)),
    }


def _driver() -> str:
    """The driver's version, from the kernel module's own file."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "unknown")
