"""What a chunk changes is put back: the engine's real managers and window pools, on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytestmark = pytest.mark.skipif(find_spec("freetoken") is None, reason="FreeToken is not installed in this environment")

PAGES, PAGE, ROWS, WIDTH = 64, 16, 4, 1024


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own part (random state, synchronisation) has nothing to act on here."""
    import torch

    for name in ("synchronize", "empty_cache", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.zeros(1))


def scheduler_of(cache_type: str, window_pool: bool) -> Any:
    import torch
    from freetoken.kvcache.hybrid_swa_pool import HybridSWAKVCache
    from freetoken.scheduler.cache import CacheManager
    from freetoken.scheduler.decode import DecodeManager
    from freetoken.scheduler.prefill import PrefillManager
    from freetoken.scheduler.table import TableManager

    pool = None
    if window_pool:
        pool = HybridSWAKVCache.__new__(HybridSWAKVCache)
        pool._swa_paged, pool._full_num_tokens, pool._page_size = True, PAGES * PAGE, PAGE
        pool._swa_num_tokens, pool._device = 900, torch.device("cpu")
        pool._init_swa_paged_state()
    page_table = torch.zeros((ROWS + 1, WIDTH), dtype=torch.int32)
    cache = CacheManager(PAGES, PAGE, page_table, cache_type, swa_pool=pool, sliding_window_size=128)
    tables = TableManager(ROWS, page_table)
    decode = DecodeManager(PAGE)
    kv_cache = SimpleNamespace(
        _kv_buffer=torch.full((PAGES, PAGE, 2), float("nan")), map=torch.ones(4, dtype=torch.int32)
    )
    return SimpleNamespace(
        cache_manager=cache,
        table_manager=tables,
        decode_manager=decode,
        prefill_manager=PrefillManager(cache, tables, decode),
        token_pool=tables.token_pool,
        device=torch.device("cpu"),
        _forward_iter=7,
        engine=SimpleNamespace(
            model=None, linear_state_pool=None, moe_offload_cache=None, kv_cache=kv_cache, encoder_cache=None
        ),
    )


def digest(scheduler: Any) -> dict[str, Any]:
    pool = scheduler.cache_manager.swa_pool
    found = {
        "free_slots": scheduler.cache_manager.free_slots.tolist(),
        "rows": list(scheduler.table_manager._free_slots),
        "page_table": scheduler.table_manager.page_table.tolist(),
        "token_pool": scheduler.token_pool.tolist(),
        "pending": len(scheduler.prefill_manager.pending_list),
        "iteration": scheduler._forward_iter,
        "running": len(scheduler.decode_manager.running_reqs),
        "evictable": scheduler.cache_manager.available_size,
    }
    if pool is not None:
        found["window_free"] = pool._swa_free.tolist()
        found["window_map"] = pool.full_to_swa_index_mapping.tolist()
    return found


def begin(scheduler: Any, lengths: list[int]) -> list[Any]:
    """Admit prompts as the probe does; gives back the batch's requests."""
    import torch
    from freetoken.core import SamplingParams
    from freetoken.message import UserMsg

    for number, length in enumerate(lengths):
        ids = torch.arange(length, dtype=torch.int32) + 1
        scheduler.prefill_manager.add_one_req(UserMsg(-1000 - number, ids, SamplingParams(max_tokens=1)))
    batch = scheduler.prefill_manager.schedule_next_batch(512)
    assert batch is not None
    return list(batch.reqs)


@pytest.mark.parametrize("window_pool", [False, True])
@pytest.mark.parametrize("lengths", [[256], [250], [100, 64, 30], [900]], ids=str)
@pytest.mark.parametrize("stage", ["admitted", "allocated", "completed"])
def test_whatever_stage_a_chunk_reached_everything_is_as_before(
    window_pool: bool, lengths: list[int], stage: str
) -> None:
    from engine_hooks.freetoken.state import Before

    scheduler = scheduler_of("swa_radix" if window_pool else "radix", window_pool)
    before = digest(scheduler)
    noted = Before(scheduler)
    for _ in range(2):  # a second run starts from what the first one put back
        noted.keep_rows(len(lengths))
        reqs = begin(scheduler, lengths)
        scheduler._forward_iter += 1
        if stage != "admitted":
            scheduler.cache_manager.allocate_paged(reqs)
            assert digest(scheduler) != before
        if stage == "completed":
            for req in reqs:
                req.complete_one()
        noted.restore(reqs)
        assert digest(scheduler) == before
    scheduler.cache_manager.check_integrity()


def test_the_lists_are_put_back_even_if_the_device_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_hooks.freetoken.state import Before

    scheduler = scheduler_of("radix", False)
    before = digest(scheduler)
    noted = Before(scheduler)
    noted.keep_rows(1)
    reqs = begin(scheduler, [256])
    scheduler.cache_manager.allocate_paged(reqs)

    def refuse(handle: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(scheduler.cache_manager, "unlock", refuse)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        noted.restore(reqs)
    after = digest(scheduler)
    assert {name: after[name] for name in ("free_slots", "rows", "pending", "iteration")} == {
        name: before[name] for name in ("free_slots", "rows", "pending", "iteration")
    }


# Shapes with a history ------------------------------------------------------------------------------------------------


class Seen:
    """What the forwards of a run were given."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []


def engine_over(scheduler: Any, seen: Seen, fail_in: str = "") -> Any:
    """The hook's engine over the real managers; preparation allocates pages and the forward only completes requests."""
    import contextlib

    import torch

    from engine_hooks.freetoken.engine import FreeTokenEngine
    from engine_hooks.freetoken.state import Before

    stream = SimpleNamespace(wait_stream=lambda other: None)

    def prepare(batch: Any) -> Any:
        scheduler._forward_iter += 1
        scheduler.cache_manager.free_swa_out_of_window_extend(batch.reqs)
        scheduler.cache_manager.allocate_paged(batch.reqs)
        if fail_in == "prepare " + batch.phase:
            raise RuntimeError("CUDA out of memory")
        return SimpleNamespace(batch=batch)

    def forward(forward_input: Any) -> Any:
        batch = forward_input.batch
        rows = [scheduler.table_manager.page_table[req.table_idx, : req.device_len].tolist() for req in batch.reqs]
        seen.batches.append(
            {
                "phase": batch.phase,
                "sequences": [(req.cached_len, req.extend_len) for req in batch.reqs],
                "chunked": [type(req).__name__ == "ChunkedReq" for req in batch.reqs],
                "slots": [slot for row in rows for slot in row],
                "images": [len(req.mm_items or ()) for req in batch.reqs],
                "decodes": len(scheduler.decode_manager.running_reqs),
            }
        )
        if fail_in == "forward " + batch.phase:
            raise RuntimeError("CUDA out of memory")
        for req in batch.reqs:
            req.complete_one()
        scheduler.decode_manager.filter_reqs(batch.reqs)
        return SimpleNamespace(copy_done_event=SimpleNamespace(synchronize=lambda: None))

    scheduler.engine.stream = scheduler.stream = stream
    scheduler.engine.max_seq_len, scheduler.engine.num_pages = 900, PAGES
    scheduler.engine_stream_ctx = contextlib.nullcontext()
    scheduler._prepare_batch, scheduler._forward = prepare, forward
    scheduler._restore_linear_states = lambda batch: None
    scheduler.prefill_budget = 256
    scheduler.config = SimpleNamespace(
        max_running_req=ROWS, use_dummy_weight=True, model_config=SimpleNamespace(vocab_size=5000)
    )
    engine = FreeTokenEngine.__new__(FreeTokenEngine)
    engine._scheduler, engine._before, engine._device = scheduler, Before(scheduler), torch.device("cpu")
    engine._given = {"max_extend_tokens": 256}
    engine.last_fault, engine.damaged = None, False
    return engine


@pytest.fixture
def _one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_hooks.freetoken import engine as module

    monkeypatch.setattr(module, "_load_prefix_compare", lambda: None)


@pytest.mark.usefixtures("_one_stream")
@pytest.mark.parametrize("window_pool", [False, True])
@pytest.mark.parametrize("word", ["full", "first", "deep", "prefix", "decode"])
def test_each_shape_is_what_the_scheduler_would_issue_and_leaves_nothing(window_pool: bool, word: str) -> None:
    from prefill_probe.shape import FAMILIES

    scheduler = scheduler_of("swa_radix" if window_pool else "radix", window_pool)
    seen = Seen()
    engine = engine_over(scheduler, seen)
    family = next(each for each in FAMILIES if each.word == word)
    limits = engine.limits()
    shape = family.shape(limits, 256, 256)
    assert shape is not None
    before = digest(scheduler)
    for _ in range(2):
        seen.batches.clear()
        assert engine.run(shape).sequences == shape.sequences
        assert digest(scheduler) == before
    last = seen.batches[-1]
    assert last["sequences"] == [(sequence.cached_tokens, sequence.new_tokens) for sequence in shape.sequences]
    assert last["chunked"] == [not shape.final] * len(shape.sequences)
    assert last["decodes"] == shape.decodes
    phases = [batch["phase"] for batch in seen.batches]
    assert phases == (["decode"] if shape.decodes else []) + ["prefill"]
    # Real pages, each once, and in no order.
    slots = last["slots"]
    assert len(set(slots)) == len(slots)
    assert sorted(slots) != slots
    assert 0 not in slots or window_pool or len(slots) < PAGES * PAGE
    if word == "deep":
        cached = shape.sequences[0].cached_tokens
        assert cached + 256 + limits.align > 900 - 1 or cached + 256 > PAGES * PAGE - 4 * 6 * PAGE
        assert not scheduler.engine.kv_cache._kv_buffer.isnan().any()
        assert scheduler.engine.kv_cache.map.tolist() == [1] * 4
    scheduler.cache_manager.check_integrity()


@pytest.mark.usefixtures("_one_stream")
@pytest.mark.parametrize("window_pool", [False, True])
@pytest.mark.parametrize("fail_in", ["prepare decode", "forward decode", "prepare prefill", "forward prefill"])
def test_a_shape_with_a_history_that_fails_anywhere_leaves_nothing(window_pool: bool, fail_in: str) -> None:
    from prefill_probe.shape import deepest_chunk

    scheduler = scheduler_of("swa_radix" if window_pool else "radix", window_pool)
    engine = engine_over(scheduler, Seen(), fail_in)
    shape = deepest_chunk(engine.limits(), 256, "deepest chunk")
    assert shape is not None
    before = digest(scheduler)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.run(shape)
    assert digest(scheduler) == before
    scheduler.cache_manager.check_integrity()


def pictures(monkeypatch: pytest.MonkeyPatch, tokens: int) -> Any:
    """A processor of the engine's own class, whose images take so many tokens."""
    import torch
    from freetoken.message import MMItem
    from freetoken.mm.config import MultimodalConfig
    from freetoken.mm.processor import MMProcessor, PromptReplacement

    from engine_hooks.freetoken import images

    class Pictures(MMProcessor):
        placeholder: ClassVar[list[int]] = [7]

        def process(self, pictures: list[Any]) -> list[Any]:
            assert [picture.size for picture in pictures] == [(images.SIDE, images.SIDE)]
            return [MMItem("image", 11, 9, [], torch.zeros(tokens, 4), None, {"grid_thw": [1, 2, 2]})]

        def prompt_replacement(self, item: Any) -> Any:
            return PromptReplacement([7] * tokens)

        def dummy_items(self, dtype: Any, device: Any) -> list[Any]:
            return []

    monkeypatch.setattr(images, "SIDE", 64)
    return Pictures("", MultimodalConfig())


@pytest.mark.usefixtures("_one_stream")
@pytest.mark.parametrize(("tokens", "issued"), [(100, 256), (400, 256)])
@pytest.mark.parametrize("fail_in", ["", "forward prefill"])
def test_a_chunk_with_an_image_takes_the_engine_s_own_processor_and_leaves_no_embedding(
    monkeypatch: pytest.MonkeyPatch, tokens: int, issued: int, fail_in: str
) -> None:
    from freetoken.mm.encoder_cache import EncoderCache

    from prefill_probe.shape import image_chunk

    scheduler = scheduler_of("radix", False)
    scheduler.engine.encoder_cache = scheduler.prefill_manager.encoder_cache = EncoderCache()
    scheduler.engine.mm_processor = pictures(monkeypatch, tokens)
    seen = Seen()
    engine = engine_over(scheduler, seen, fail_in)
    shape = image_chunk(engine.limits(), 256, "chunk with an image")
    assert shape is not None
    before = digest(scheduler)
    if fail_in:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.run(shape)
    else:
        assert engine.run(shape).new_tokens == issued
    assert seen.batches[0]["images"] == [1]
    assert scheduler.engine.encoder_cache._entries == {}
    assert digest(scheduler) == before


@pytest.mark.usefixtures("_one_stream")
def test_a_checkpoint_whose_images_cannot_be_prepared_refuses_the_shape() -> None:
    from prefill_probe import Sequence, Shape
    from prefill_probe.engine import ShapeRefused

    scheduler = scheduler_of("radix", False)
    before = digest(scheduler)
    scheduler.engine.mm_processor = SimpleNamespace(placeholder=[7])
    with pytest.raises(ShapeRefused, match="prepares no image: AttributeError"):
        engine_over(scheduler, Seen()).run(Shape("image", (Sequence(0, 64),), image=True))
    assert digest(scheduler) == before


@pytest.mark.usefixtures("_one_stream")
def test_several_sequences_with_a_history_are_refused() -> None:
    from prefill_probe import Sequence, Shape

    engine = engine_over(scheduler_of("radix", False), Seen())
    with pytest.raises(ValueError, match="single sequence"):
        engine.run(Shape("two", (Sequence(64, 64), Sequence(64, 64))))
