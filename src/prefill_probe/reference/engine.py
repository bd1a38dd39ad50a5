"""ReferenceEngine: a small engine that boots as one does, and runs what the probe asks for.

It starts in the order of an engine: weights, state slots, KV pages for what ``memory_ratio`` leaves, and the decode
step in a CUDA graph. It serves nobody: a request is what the probe asks for, and sampling is greedy.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from prefill_probe import __version__
from prefill_probe.composition import Frame, Mark
from prefill_probe.engine import Budget, Geometry, Identity, PlanRefused, Routing, ShapeRefused
from prefill_probe.holdings import added
from prefill_probe.layers import watched
from prefill_probe.machine import gpu_of, versions_of
from prefill_probe.meter import CudaMeter, Meter
from prefill_probe.reference.batch import Decode, Prefill, Span
from prefill_probe.reference.config import GDN, ModelConfig
from prefill_probe.reference.gdn import CHUNK
from prefill_probe.reference.model import Model
from prefill_probe.reference.pools import PAGE_TOKENS, KvPool, StatePool, page_bytes
from prefill_probe.reference.sites import place_of, site_of
from prefill_probe.shape import DECODE_PROMPT_TOKENS, Limits, Sequence, Shape

T = TypeVar("T")

# Of weights and prompts: always the same.
SEED = 20260101
# Page 0, which no request gets, and one that one can have.
_LEAST_PAGES = 2


@dataclass(frozen=True)
class Flags:
    """What an operator says to an engine.

    Attributes:
        memory_ratio: share of free memory before load that weights, state and pools take together.
        max_prefill_length: tokens of a chunk.
        max_running_requests: requests at once.
    """

    memory_ratio: float = 0.95
    max_prefill_length: int = 8192
    max_running_requests: int = 4


@dataclass
class _Request:
    """Its cached and new tokens, pages, and slot of the state pool."""

    cached: int
    new: int
    pages: list[int]
    slot: int


class ReferenceEngine:
    """The Engine protocol over a model with random weights on one GPU.

    Args:
        config: the model.
        flags: as at an engine's start.
        device: a CUDA device.

    Raises:
        torch.OutOfMemoryError: weights, state or the decode step do not fit.
        PlanRefused: ``memory_ratio`` leaves nothing for the KV pool.
    """

    def __init__(self, config: ModelConfig, flags: Flags, device: torch.device) -> None:
        self.meter: Meter
        self.rank = 0
        self._config, self._flags, self._device = config, flags, device
        self._budget = flags.max_prefill_length
        self._issued: tuple[Sequence, ...] = ()
        torch.cuda.synchronize(device)  # the context is there from now on
        self._free_before_load = int(torch.cuda.mem_get_info(device)[0])
        torch.manual_seed(SEED)
        # One for all captures: the matrix library keeps a workspace for every stream that it is used on.
        self._capture_stream = torch.cuda.Stream(device)
        with torch.inference_mode():
            self._model = Model(config, device)
            # A snapshot beside each live state, as engines keep them for prefix hits.
            self._states = StatePool(config, 2 * flags.max_running_requests, device)
            self._warm_up()
            self._free_before_pool = int(torch.cuda.mem_get_info(device)[0])
            self._kv = KvPool(config, self._pages_at(flags.memory_ratio), device)
            self._capture()
        self._pages_at_start = self._kv.pages
        self.meter = CudaMeter(device)

    def _warm_up(self) -> None:
        """A short chunk over a pool of its own: compiles and tunes every kernel, and what it loads is then planned."""
        tokens = min(2 * CHUNK, self._budget, self._config.longest - 2)
        self._kv = KvPool(self._config, _LEAST_PAGES + tokens // PAGE_TOKENS, self._device)
        self.run(Shape("warm-up", (Sequence(0, tokens),)))
        del self._kv
        torch.cuda.empty_cache()

    # What it is ------------------------------------------------------------------------------------------------

    def identity(self) -> Identity:
        config, flags = self._config, self._flags
        return Identity(
            engine={"name": "reference", "version": __version__},
            model={
                "path": config.path,
                "architecture": config.architecture,
                "layers": len(config.kinds),
                "hidden_size": config.hidden_size,
                "experts": config.experts,
                "experts_per_token": config.experts_per_token,
                "quantization": "none",
                "dummy_weights": True,
            },
            gpu=gpu_of(self._device),
            flags={
                "--memory-ratio": flags.memory_ratio,
                "--max-prefill-length": flags.max_prefill_length,
                "--max-running-requests": flags.max_running_requests,
                "--layers": len(config.kinds),
            },
            versions=versions_of("torch", "triton", "fla-core", "prefill-probe"),
        )

    def limits(self) -> Limits:
        return Limits(
            requested_chunk=self._flags.max_prefill_length,
            budget=self._budget,
            budget_capped_by="",
            align=CHUNK,
            longest_prompt=self._config.longest - 1,
            max_sequences=self._flags.max_running_requests,
            page_tokens=PAGE_TOKENS,
            kv_pages=self._kv.usable_pages,
            state_tokens=CHUNK if self._config.count(GDN) else 0,
        )

    def budget(self) -> Budget:
        return Budget(
            self._flags.memory_ratio,
            self._free_before_load,
            ratio_governs=page_bytes(self._config) > 0,
            chunk_governs=True,
        )

    def plan(self, memory_ratio: float) -> Geometry:
        return self._geometry(self._pages_at(memory_ratio))

    def _pages_at(self, memory_ratio: float) -> int:
        """KV pages for what is left of ``memory_ratio`` after weights and state.

        Raises:
            PlanRefused: not one that a request could have.
        """
        taken = self._free_before_load - self._free_before_pool
        size = page_bytes(self._config)
        # A model without attention has no KV pool to size; it gets pages for its longest prompts, which take nothing.
        if not size:
            return _LEAST_PAGES + self._flags.max_running_requests * -(-self._config.longest // PAGE_TOKENS)
        pages = int(memory_ratio * self._free_before_load - taken) // size
        if pages < _LEAST_PAGES:
            raise PlanRefused(
                f"no memory for the KV pool: weights and state take {taken / self._free_before_load:.2f} of what was "
                f"free, and --memory-ratio is {memory_ratio:.2f}"
            )
        return pages

    def _geometry(self, pages: int) -> Geometry:
        return Geometry((pages - 1) * PAGE_TOKENS, None, pages * page_bytes(self._config))

    def resize(self, flags: Mapping[str, int | float]) -> Geometry:
        """The KV pool is freed and made anew, and the decode step captured again.

        Raises:
            PlanRefused: as ``plan``, or the pool cannot be had; then it is as before.
        """
        ratio = flags.get("--memory-ratio")
        pages = self._pages_at_start if ratio is None else self._pages_at(float(ratio))
        before = self._kv.pages
        if pages != before:
            try:
                self._make_pool(pages)
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)
                pages = 0
            if not pages:
                self._make_pool(before)
                raise PlanRefused(f"no memory for the KV pool at {dict(flags)}")
        return self._geometry(pages)

    def _make_pool(self, pages: int) -> None:
        for name in ("_graph", "_step", "_tokens", "_kv"):  # one that failed half way has made only some of them
            vars(self).pop(name, None)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        with torch.inference_mode():
            self._kv = KvPool(self._config, pages, self._device)
            self._capture()

    def adopt_chunk(self, tokens: int) -> None:
        self._budget = tokens

    # What it runs ----------------------------------------------------------------------------------------------

    def run(self, shape: Shape) -> Shape:
        """One chunk: admission, pages and slots, a decode step beside it, restored state, forward, greedy sampling.

        Cached tokens have pages, rows and state; no forward was run for them. Whatever the outcome, pages and slots go
        back to free lists that are as before.

        Raises:
            ShapeRefused: it has more sequences or tokens than the pools admit.
        """
        self._issued = ()
        pages, slots = list(self._kv.free), list(self._states.free)
        with torch.inference_mode():  # around the clean-up too: what was made in it may be written to in it alone
            try:
                # Alive until the chunk is through: an engine that overlaps reads it only then.
                last_step = self._decode_beside(shape.decodes)
                requests = self._admit(shape)
                self._issued = tuple(Sequence(request.cached, request.new) for request in requests)
                if shape.restored:
                    for request in requests:
                        self._states.copy(self._states.free.pop(), request.slot)
                batch = self._batch(requests, final=shape.final)
                self._sample(self._model.prefill(batch, self._kv, self._states))
                del last_step
                return self.issued(shape)
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # they hold the chunk's tensors
                raise
            finally:
                torch.cuda.synchronize(self._device)
                for slot in set(slots) - set(self._states.free):
                    self._states.clear(slot)
                self._kv.free, self._states.free = pages, slots

    def issued(self, shape: Shape) -> Shape:
        return replace(shape, sequences=self._issued) if self._issued else shape

    def _request(self, cached: int, new: int) -> _Request:
        """A request with its pages, one token to generate included.

        Raises:
            ShapeRefused: there are not enough.
        """
        count = -(-(cached + new + 1) // PAGE_TOKENS)
        if count > len(self._kv.free) or not self._states.free or cached + new >= self._config.longest:
            raise ShapeRefused(f"no room for a request of {cached + new} tokens: {len(self._kv.free)} pages are free")
        pages = self._kv.free[-count:]
        del self._kv.free[-count:]
        return _Request(cached, new, pages, self._states.free.pop())

    def _admit(self, shape: Shape) -> list[_Request]:
        """Requests in order, until the budget is spent.

        Raises:
            ShapeRefused: more requests than may run, or no room for one.
        """
        if len(shape.sequences) + shape.decodes > self._flags.max_running_requests:
            raise ShapeRefused(f"at most {self._flags.max_running_requests} requests run at once")
        requests, left = [], self._budget
        for sequence in shape.sequences:
            if left < 1:
                break
            requests.append(self._request(sequence.cached_tokens, min(left, sequence.new_tokens)))
            left -= requests[-1].new
        return requests

    def _batch(self, requests: list[_Request], *, final: bool) -> Prefill:
        """The tensors of a chunk; ids are drawn over the whole vocabulary."""
        chance = torch.Generator().manual_seed(SEED)
        total = sum(request.new for request in requests)
        ids = torch.randint(self._config.vocab_size, (total,), generator=chance)
        positions, rows, spans, bounds = [], [], [], [0]
        for request in requests:
            every = torch.arange(request.cached + request.new)
            at = torch.tensor(request.pages)[every // PAGE_TOKENS] * PAGE_TOKENS + every % PAGE_TOKENS
            positions.append(every[request.cached :])
            rows.append(at[request.cached :])
            spans.append(Span(bounds[-1], bounds[-1] + request.new, self._moved(at[: request.cached])))
            bounds.append(bounds[-1] + request.new)
        return Prefill(
            ids=self._moved(ids),
            positions=self._moved(torch.cat(positions)),
            rows=self._moved(torch.cat(rows)),
            states=self._moved(torch.tensor([request.slot for request in requests])),
            bounds=self._moved(torch.tensor(bounds)),
            last=self._moved(torch.tensor([end - 1 for end in bounds[1:]] if final else [], dtype=torch.int64)),
            spans=tuple(spans),
        )

    def _moved(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._device)

    def _sample(self, scores: torch.Tensor) -> torch.Tensor:
        """The most likely next tokens, in host memory."""
        return scores.argmax(dim=-1).cpu()

    # The decode step -------------------------------------------------------------------------------------------

    def _capture(self) -> None:
        """Capture one decode step of as many requests as may run; rows without a request use page and slot 0."""
        count = self._flags.max_running_requests
        width = -(-self._config.longest // PAGE_TOKENS)
        ids, positions, rows, states = torch.zeros((4, count), dtype=torch.int64, device=self._device)
        pages = torch.zeros((count, width), dtype=torch.int32, device=self._device)
        self._step = Decode(ids, positions, rows, states, pages)
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._capture_stream):  # compiles and tunes, which a capture cannot
            self._decode_forward()
        torch.cuda.synchronize(self._device)
        self._graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._capture_stream):
            self._tokens = self._decode_forward()
        self._states.clear(0)

    def _decode_forward(self) -> torch.Tensor:
        return self._model.decode(self._step, self._kv, self._states).argmax(dim=-1)

    def _decode_beside(self, count: int) -> Any:
        """One decode step of ``count`` requests; what an engine still holds of it when the next batch is launched."""
        if not count:
            return None
        requests = [self._request(DECODE_PROMPT_TOKENS, 1) for _ in range(count)]
        step, place = self._step, DECODE_PROMPT_TOKENS
        for number, request in enumerate(requests):
            step.positions[number] = place
            step.rows[number] = request.pages[place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS
            step.states[number] = request.slot
            step.pages[number, : len(request.pages)] = self._moved(torch.tensor(request.pages, dtype=torch.int32))
        self._graph.replay()
        tokens = self._tokens.clone()
        for tensor in (step.positions, step.rows, step.states, step.pages):
            tensor.zero_()
        return tokens

    # What the probe asks of it ---------------------------------------------------------------------------------

    def site(self, error: BaseException) -> str:
        return site_of(error)

    def place(self, frames: Sequence_[Frame]) -> tuple[str, str]:
        return place_of(frames)

    @contextlib.contextmanager
    def observe(self) -> Iterator[list[Routing]]:
        """Count the experts of every MoE layer. Their ids are copied to host memory, which waits for each layer."""
        found: list[Routing] = []
        seen: list[torch.Tensor] = []
        self._model.experts.seen = seen
        try:
            yield found
        finally:
            self._model.experts.seen = None
            loads = [ids.flatten().bincount() for ids in seen]
            if loads:
                distinct = tuple(int((load > 0).sum()) for load in loads)
                found.append(Routing(self._config.experts, distinct, tuple(int(load.max()) for load in loads)))

    def layers(self) -> contextlib.AbstractContextManager[list[Mark]]:
        return watched(self._model.layers, self.meter.allocations, "prefill")

    def holdings(self) -> dict[str, int]:
        seen: dict[int, int] = {}
        parts = {
            "weights": self._model,
            "kv_pool": self._kv,
            "state_pool": self._states,
            "graphs": (self._step, self._tokens),
        }
        sizes = {name: added(part, seen, (__package__,)) for name, part in parts.items()}
        return sizes | {"graphs": sizes["graphs"] + self.meter.graph_bytes()}

    def gather(self, value: T) -> list[T]:
        return [value]

    def settle(self) -> None:
        """Give the allocator's cache back, and forget the probe's peaks. Nothing else is left of a run."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self.meter.forget_peaks()
