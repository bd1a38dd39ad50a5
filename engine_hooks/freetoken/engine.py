"""FreeTokenEngine: a booted FreeToken scheduler as the probe's ``Engine``."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import traceback
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import replace
from typing import Any, TypeVar

from engine_hooks.freetoken import images, routing
from engine_hooks.freetoken.holdings import decoder_layers, holdings
from engine_hooks.freetoken.layer_kinds import layer_kinds
from engine_hooks.freetoken.planner import Planner, PlannerTap, quiet
from engine_hooks.freetoken.routers import Perturbed
from engine_hooks.freetoken.sites import place_of, site_of
from engine_hooks.freetoken.state import Before
from prefill_probe.composition import Frame, Mark
from prefill_probe.engine import (
    Budget,
    Geometry,
    Identity,
    NotResizable,
    PlanRefused,
    Routing,
    ShapeRefused,
)
from prefill_probe.faults import classify
from prefill_probe.layers import watched
from prefill_probe.machine import gpu_of, version_of, versions_of
from prefill_probe.meter import CudaMeter, Meter, Peak
from prefill_probe.shape import DECODE_OUTPUT_TOKENS, DECODE_PROMPT_TOKENS, Limits, Sequence, Shape, full_chunk

T = TypeVar("T")

# Token ids of the synthetic prompt: drawn over the whole vocabulary, always the same.
SEED = 20260101
# GDN kernels work in chunks of 64 tokens (freetoken.kernel.fla.chunk.CHUNK_SIZE).
GDN_CHUNK = 64
# Ids of the probe's requests: no client has a negative one.
_UID = -1000
_DECODE_UID = -100_000
# After every step the engine makes a new list of the free pages (4 bytes each) on the scheduler's stream. It takes the
# block of the list before the last, unless that list was shorter: requests end, and then there are three.
_LISTS = 2


class FreeTokenEngine:
    """The Engine protocol over a ``Scheduler`` that has just been built and has served nothing.

    Args:
        scheduler: at the end of its ``__init__``.
        noted: what the planner was asked while it booted.
        peaks: of the allocator's statistics, each before the engine reset them.
    """

    def __init__(self, scheduler: Any, noted: PlannerTap, peaks: list[Peak] | None = None) -> None:
        self._scheduler = scheduler
        self._planner = Planner(scheduler.engine, noted)
        self._given = noted.given
        self._device = scheduler.device
        self._issued: tuple[Sequence, ...] = ()
        # The error behind a fault, for whoever raises it again; never one that holds tensors.
        self.last_fault: BaseException | None = None
        # Whether a run could not be undone: the engine must not serve then, in no mode.
        self.damaged = False
        self.meter: Meter = CudaMeter(scheduler.device, peaks)
        self.rank = int(scheduler.config.tp_info.rank)

    @functools.cached_property
    def _before(self) -> Before:
        """The bookkeeping before the first run; let go when the engine is settled, for it holds lists on the device."""
        return Before(self._scheduler)

    # What it is ------------------------------------------------------------------------------------------------

    def identity(self) -> Identity:
        return self._identity

    @functools.cached_property
    def _identity(self) -> Identity:
        config = self._scheduler.config
        model = config.model_config
        return Identity(
            engine={"name": "freetoken", "version": version_of("freetoken")},
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
            gpu=gpu_of(self._device),
            flags=self._flags(),
            versions=versions_of("torch", "triton", "transformers", "flashlib", "prefill-probe"),
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
            images=getattr(engine, "encoder_cache", None) is not None,
            state_tokens=GDN_CHUNK if engine.linear_state_pool is not None else 0,
        )

    def budget(self) -> Budget:
        return self._planner.budget()

    def plan(self, memory_ratio: float) -> Geometry:
        return self._planner.plan(memory_ratio)

    def resize(self, flags: Mapping[str, int | float]) -> Geometry:
        """By ``Scheduler.rebuild_cache``, which frees the pools, makes them anew and captures the graphs again."""
        import torch
        from freetoken.engine.engine import CacheRebuildRejected

        scheduler, present = self._scheduler, self._planner.present()
        changes = {name: size for name, size in self._planner.sizes(flags).items() if size != present[name]}
        if not changes:
            return self._planner.geometry()
        if scheduler.config.tp_info.size > 1:
            raise NotResizable("the engine resizes its pools in place only without tensor parallelism")
        if not scheduler.cache_manager.supports_runtime_rebuild:
            raise NotResizable("the engine does not resize this model's pools in place")
        try:
            with torch.inference_mode(), quiet(), contextlib.ExitStack() as unchecked:
                if not flags:
                    # A resize is priced more strictly than a start: what stood a moment ago may be refused.
                    unchecked.enter_context(_unpriced(scheduler.engine.kv_cache))
                scheduler.rebuild_cache(**changes)
        except CacheRebuildRejected as rejection:
            raise PlanRefused(str(rejection).splitlines()[0]) from None
        except Exception as error:
            self.damaged = True  # until the pools of the start stand again
            traceback.clear_frames(error.__traceback__)
            gc.unfreeze()  # what it made, and what it was to replace, may be among the objects that are set aside
            raise PlanRefused(f"the pools could not be made: {type(error).__name__}") from None
        self.damaged = False
        self._before = Before(scheduler, rng=self._before.rng)
        return self._planner.geometry()

    def adopt_chunk(self, tokens: int) -> None:
        """The scheduler's budget, and the configuration's, from which a resize of the pools makes the budget anew."""
        scheduler = self._scheduler
        for config in (scheduler.config, scheduler.engine.config):
            object.__setattr__(config, "max_extend_tokens", tokens)  # frozen; the engine changes it in the same way
        cap = scheduler.cache_manager.prefill_chunk_budget
        scheduler.prefill_budget = min(tokens, cap) if cap else tokens

    # How it would start with fewer layers ------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The scheduler's."""
        return self._scheduler.config

    def layer_kinds(self) -> list[Any]:
        """Of each decoder layer what tells its kind; empty where they are not kept in one list."""
        return layer_kinds(decoder_layers(self._scheduler.engine.model), self.config.model_config)

    def pinned(self, arguments: Sequence_[str]) -> list[str]:
        """As ``Planner.pinned``."""
        return self._planner.pinned(arguments)

    # What it runs ----------------------------------------------------------------------------------------------

    def run(self, shape: Shape) -> Shape:
        """One prefill pass, as ``Scheduler.overlap_loop`` runs it: admission, preparation, restore, forward, sampler.

        Only what speaks to clients is left out. Cached tokens have real pages, rows and state, whose content is
        blank: no forward is run for them. Whatever the outcome, everything that the pass took is given back.

        Raises:
            ShapeRefused: the scheduler does not admit it.
            ValueError: several sequences of which one has cached tokens.
        """
        import torch
        from freetoken.env import ENV

        self._issued = ()
        if shape.cached_tokens and len(shape.sequences) > 1:
            raise ValueError("only a single sequence can have cached tokens")
        scheduler = self._scheduler
        self._before.keep_rows(len(shape.sequences) + shape.decodes)
        _load_prefix_compare()
        reqs: list[Any] = []
        failed = True
        try:
            with torch.inference_mode():
                self._before.shuffle_free_pages()
                if ENV.DISABLE_OVERLAP_SCHEDULING:
                    with torch.cuda.stream(scheduler.engine.stream):
                        self._pass(shape, reqs)
                else:
                    self._pass(shape, reqs)
            failed = False
            return self.issued(shape)
        except ShapeRefused:
            raise
        except Exception as error:
            self.last_fault = None if classify(error).is_memory else error
            traceback.clear_frames(error.__traceback__)  # they hold the chunk's tensors
            raise
        finally:
            self.damaged = True
            torch.cuda.synchronize(self._device)
            with torch.inference_mode():
                self._before.restore(reqs, failed=failed)
            self.damaged = False

    def issued(self, shape: Shape) -> Shape:
        """What the scheduler made of ``shape`` when it was last run, also if that run failed later."""
        return replace(shape, sequences=self._issued) if self._issued else shape

    def _pass(self, shape: Shape, reqs: list[Any]) -> None:
        """``reqs`` is filled with the requests that hold something, as they come."""
        scheduler = self._scheduler
        engine = scheduler.engine
        # Alive until the chunk is through, as in the engine's overlapped loop.
        last_step = self._decode_step(shape.decodes, reqs) if shape.decodes else None
        for request in self._requests(shape):
            scheduler.prefill_manager.add_one_req(request)
        running = len(reqs)
        if shape.cached_tokens:
            self._walk_to(shape.cached_tokens, reqs)
        scheduler.stream.wait_stream(engine.stream)
        batch = scheduler.prefill_manager.schedule_next_batch(scheduler.prefill_budget)
        if batch is None:
            raise ShapeRefused("the scheduler admits no request of it")
        reqs[running:] = batch.reqs
        self._issued = tuple(Sequence(req.cached_len, req.extend_len) for req in batch.reqs)
        if shape.restored:
            for req in batch.reqs:
                if req.cached_len and req.mamba_ping_pong is not None:
                    # As a prefix hit: from a snapshot's slot, here the one that this chunk does not write to.
                    req.mamba_restore_src = req.mamba_ping_pong[1 - req.mamba_next_track_idx]
        output = self._launch(scheduler._prepare_batch(batch))
        scheduler.stream.wait_stream(engine.stream)
        for _ in range(_LISTS):
            with scheduler.cache_manager.lazy_free_region():
                pass  # as after every step, here with no page to give back
        output.copy_done_event.synchronize()
        del last_step

    def _launch(self, forward_input: Any) -> Any:
        scheduler = self._scheduler
        with scheduler.engine_stream_ctx:
            scheduler.engine.stream.wait_stream(scheduler.stream)
            scheduler._restore_linear_states(forward_input.batch)
            return scheduler._forward(forward_input)

    def _walk_to(self, cached_tokens: int, reqs: list[Any]) -> None:
        """Bring the waiting prompt to ``cached_tokens``, by the scheduler's own passes, without their forwards.

        In one pass, or where a window pool holds only part of a prompt, in passes as requests have them.
        """
        scheduler = self._scheduler
        running, done = len(reqs), 0
        step = scheduler.prefill_budget if scheduler.cache_manager.swa_pool is not None else cached_tokens
        self._before.blank_cache()
        while done < cached_tokens:
            batch = scheduler.prefill_manager.schedule_next_batch(min(step, cached_tokens - done))
            if batch is None or not batch.reqs[0].extend_len:
                raise ShapeRefused(f"the scheduler admits only {done} of {cached_tokens} cached tokens")
            reqs[running:] = batch.reqs
            done += self._skip(batch.reqs)

    def _skip(self, batch_reqs: list[Any]) -> int:
        """What a prefill pass does to its requests, without the forward; the tokens that it would have processed."""
        cache = self._scheduler.cache_manager
        tokens = sum(int(req.extend_len) for req in batch_reqs)
        cache.free_swa_out_of_window_extend(batch_reqs)
        cache.allocate_paged(batch_reqs)
        for req in batch_reqs:
            req.complete_one()
        return tokens

    def _decode_step(self, count: int, reqs: list[Any]) -> Any:
        """One step of ``count`` requests that generate; gives back what the overlapped loop keeps of it.

        It is launched, also where the start captured no graph for so many and its kernels may compile for minutes: the
        driver takes memory for their stacks that it keeps (measured on an H200: 1,578 MiB for 512 expert ids in the
        expert cache's lookup), and the chunks of a server come after such steps.
        """
        scheduler = self._scheduler
        shape = Shape("decodes", tuple(Sequence(0, DECODE_PROMPT_TOKENS) for _ in range(count)))
        for request in self._requests(shape, first_uid=_DECODE_UID, max_tokens=DECODE_OUTPUT_TOKENS):
            scheduler.prefill_manager.add_one_req(request)
        self._before.blank_cache()
        while scheduler.prefill_manager.pending_list:
            batch = scheduler.prefill_manager.schedule_next_batch(shape.new_tokens)
            if batch is None:
                raise ShapeRefused(f"the scheduler does not admit {count} requests beside the chunk")
            reqs += batch.reqs
            self._skip(batch.reqs)
            scheduler.decode_manager.filter_reqs(batch.reqs)
        scheduler.stream.wait_stream(scheduler.engine.stream)
        forward_input = scheduler._prepare_batch(scheduler.decode_manager.schedule_next_batch())
        return forward_input, self._launch(forward_input)

    def _requests(self, shape: Shape, first_uid: int = _UID, max_tokens: int = 1) -> list[Any]:
        """Requests as the API server would send them.

        The full chunk is sampled as a request that names nothing is, by the checkpoint's own defaults; smaller chunks
        greedily, so that both paths of the sampler that requests will take are loaded, and no other. A prompt that
        does not end with its chunk is longer by as little as makes it so.
        """
        import torch
        from freetoken.core import SamplingParams
        from freetoken.message import UserMsg

        full = shape.new_tokens >= full_chunk(self.limits()).new_tokens
        sampling = self._default_sampling() if full else {"temperature": 0.0}
        generator = torch.Generator().manual_seed(SEED)
        vocabulary = int(self._scheduler.config.model_config.vocab_size)
        messages = []
        for number, sequence in enumerate(shape.sequences):
            length = sequence.cached_tokens + sequence.new_tokens + (not shape.final)
            ids = torch.randint(vocabulary, (length,), generator=generator, dtype=torch.int32)
            chosen = SamplingParams(**sampling, max_tokens=max_tokens)
            if shape.image:
                made = images.with_image(self._scheduler.engine.mm_processor, ids, length)
                extra = {name: getattr(made, name) for name in ("mm_items", "mrope_positions", "mrope_delta")}
                messages.append(UserMsg(first_uid - number, made.input_ids, chosen, **extra))
            else:
                messages.append(UserMsg(first_uid - number, ids, chosen))
        return messages

    def _default_sampling(self) -> dict[str, Any]:
        """What the API server fills in for a request that says nothing of sampling."""
        from freetoken.utils import load_generation_sampling

        config = self._scheduler.config
        if config.use_dummy_weight or getattr(config, "sampling_defaults", "model") != "model":
            return {"temperature": 0.0}
        given = load_generation_sampling(config.model_path)
        return {name: given[name] for name in ("temperature", "top_k", "top_p") if name in given}

    @contextlib.contextmanager
    def perturbed_routers(self) -> Iterator[Perturbed]:
        """While the block runs, routers with dummy weights choose as trained ones do; whatever ends it, they are as
        before, or the engine is ``damaged``."""
        perturbed = Perturbed(self._scheduler.engine.model)
        try:
            yield perturbed
        finally:
            damaged, self.damaged = self.damaged, True
            self.damaged = not perturbed.restore() or damaged

    def site(self, error: BaseException) -> str:
        return site_of(error)

    def place(self, frames: Sequence_[Frame]) -> tuple[str, str]:
        return place_of(frames)

    def observe(self) -> contextlib.AbstractContextManager[list[Routing]]:
        return routing.observed()

    def layers(self) -> contextlib.AbstractContextManager[list[Mark]]:
        return watched(decoder_layers(self._scheduler.engine.model), self.meter.allocations)

    def holdings(self) -> dict[str, int]:
        return holdings(self._scheduler.engine, self.meter.graph_bytes())

    def gather(self, value: T) -> list[T]:
        size = self._scheduler.config.tp_info.size
        if size == 1:
            return [value]
        import torch.distributed

        values: list[Any] = [None] * size
        torch.distributed.all_gather_object(values, value, group=self._scheduler.engine.tp_cpu_group)
        return values

    def settle(self) -> None:
        """Give the allocator's cache back to the device, and forget the probe's peaks and what it noted of lists."""
        import torch

        # The guard keeps this engine for as long as it serves, and the scheduler soon replaces its list of free pages.
        self.__dict__.pop("_before", None)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self.meter.forget_peaks()


@contextlib.contextmanager
def _unpriced(pool: Any) -> Iterator[None]:
    """While the block runs, the pool accepts any size."""
    pool.validate_rebuild = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del pool.validate_rebuild


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


def _quantization(model: Any) -> str:
    experts = getattr(model, "expert_quant", "none")
    if experts in (None, "none"):
        experts = getattr(model, "moe_weight_format", None) or "none"
    return str(experts)
