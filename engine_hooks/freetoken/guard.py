"""The guard in FreeToken's scheduler: before each prefill batch, its budget is what is sure to come back.

``PrefillManager.schedule_next_batch`` is asked with a smaller budget, or not at all; nothing of a forward is caught.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from engine_hooks.freetoken.engine import FreeTokenEngine
from engine_hooks.freetoken.unavailable import REFUSED
from prefill_probe import guard as rules
from prefill_probe.faults import PrefillOOMError, classify
from prefill_probe.logs import get_logger
from prefill_probe.sizes import mib

# The error's code on the wire.
CODE = "insufficient_memory"
# How long a pass that nothing fits is tried again before its requests end.
PATIENCE_SECONDS = 2.0
# How often a pass looks again at what there is, where another process was faster.
_LOOKS = 3
# A pass that cannot go on and has nothing to decode is tried again after so long.
_PAUSE_SECONDS = 0.01
# Requests up to this size come from a pool of their own.
_SMALL_BYTES, _SMALL_BLOCKS = 1 << 20, 4
# Between two lines of the log that say the same.
_QUIET_SECONDS = 10.0


class Guard:
    """The guard of one scheduler, on every rank alike.

    Args:
        engine: the probe's, settled.
        needs: of this boot's chunks.
        on_miss: called with the error's text when a prefill runs out of memory all the same.
        on_count: called with the counters whenever they have changed, on a prefill pass; to come back at once.
    """

    def __init__(
        self,
        engine: FreeTokenEngine,
        needs: rules.Needs,
        on_miss: Callable[[str], None],
        on_count: Callable[[rules.Counters], None] = lambda counters: None,
    ) -> None:
        self.counters = rules.Counters()
        self._on_count = on_count
        self._engine = engine
        self._needs = needs
        self._on_miss = on_miss
        self._align = engine.limits().align
        self._log = get_logger()
        self._refused_since: float | None = None
        self._shrunk_said = -_QUIET_SECONDS
        self._stuck = 0
        self.read_idle()

    def attach(self, scheduler: Any) -> None:
        """Stand in front of the scheduler's own functions, on this instance."""
        self._scheduler = scheduler
        manager = scheduler.prefill_manager
        schedule, forward, rebuild = manager.schedule_next_batch, scheduler._forward, scheduler.rebuild_cache

        def schedule_next_batch(prefill_budget: int) -> Any:
            if not manager.pending_list:
                return schedule(prefill_budget)
            tokens = min(prefill_budget, _waiting(manager))
            allowed = self._allowed(tokens)
            if allowed == tokens:
                return schedule(prefill_budget)
            return schedule(allowed) if allowed else None

        def guarded_forward(forward_input: Any) -> Any:
            try:
                return forward(forward_input)
            except Exception as error:
                if forward_input.batch.is_prefill and classify(error).is_memory:
                    raise self._miss(forward_input.batch, error) from error
                raise

        def rebuild_cache(*args: Any, **kwargs: Any) -> Any:
            done = rebuild(*args, **kwargs)
            self.read_idle()
            return done

        manager.schedule_next_batch = schedule_next_batch
        scheduler._forward, scheduler.rebuild_cache = guarded_forward, rebuild_cache

    def read_idle(self) -> None:
        """Note, at an idle moment, what the allocator holds and can never hand out, and say so if a full chunk no
        longer fits."""
        idle = self._engine.meter.read()
        self._stuck = idle.reserved_bytes - idle.allocated_bytes
        full = self._needs.sizes[-1]
        if not rules.fits(self._needs, full, rules.Memory(idle.free_bytes, 0)):
            allowed = rules.largest(self._needs, full, rules.Memory(idle.free_bytes, 0), self._align)
            self._log.warning(
                f"guard: a prefill chunk of {full} tokens needs up to {mib(self._needs.at(full))} and "
                f"{mib(idle.free_bytes)} are free; until there is more, chunks have {allowed} tokens at most"
            )

    # Before a batch --------------------------------------------------------------------------------------------

    def _allowed(self, tokens: int) -> int:
        """How many of ``tokens`` this pass may take; 0: none, now."""
        found, expired = self._agreed(tokens)
        if found:
            self._refused_since = None
            if found < tokens:
                self.counters.passes_shrunk += 1
                self.counters.tokens_delayed += tokens - found
                self._on_count(self.counters)
                self._say_shrunk(tokens, found)
            return found
        if expired:
            self._refuse(tokens)
            self._refused_since = None
        elif not self._scheduler.decode_manager.runnable:
            time.sleep(_PAUSE_SECONDS)
        return 0

    def _agreed(self, tokens: int) -> tuple[int, bool]:
        """The least that any rank allows, and whether the patience of any is at its end."""
        fits = self._held(tokens) or (rules.fits(self._needs, tokens, self._memory()) and self._hold(tokens))
        found = tokens if fits else self._after_release(tokens)
        if not found and self._refused_since is None:
            self._refused_since = time.monotonic()
        expired = not found and time.monotonic() - (self._refused_since or 0.0) > PATIENCE_SECONDS
        answers = self._engine.gather((found, expired))
        least = min(each for each, _ in answers)
        if not least and self._refused_since is None:
            self._refused_since = time.monotonic()  # another rank's shortage is this one's
        return least, any(ended for _, ended in answers)

    def _after_release(self, tokens: int) -> int:
        """What fits once the allocator has given back what it holds unused, but for what decoding needs."""
        kept = self._decode_memory()
        self._engine.meter.release()
        del kept
        for _ in range(_LOOKS):
            found = rules.largest(self._needs, tokens, self._memory(), self._align)
            if not found or self._held(found) or self._hold(found):
                return found
        return 0

    def _held(self, tokens: int) -> bool:
        """Whether the allocator holds what a chunk of ``tokens`` needs; from the second chunk on it does, and this is
        all that a pass costs."""
        unused = self._engine.meter.unused() - self._stuck
        return rules.fits(self._needs, tokens, rules.Memory(0, max(0, unused)))

    def _hold(self, tokens: int) -> bool:
        """Whether the allocator could be made to hold what a chunk of ``tokens`` needs, before it is launched.

        What is only free on the device another process may take in the middle of the forward. One block is asked for
        and let go of: the chunk's own are cut from it.
        """
        import torch

        scheduler = self._scheduler
        kept = self._decode_memory()  # an allocator that finds nothing gives back all that it holds unused
        want = max(0, self._needs.at(tokens) - sum(block.numel() for block in kept))
        memory = self._memory()
        available = memory.free_bytes + memory.unused_bytes
        if available < want:
            return False
        # Where there is room, as much as the next pass asks for to find all of it held.
        ample = self._needs.at(tokens) + self._needs.fragments_bytes + self._stuck
        first = ample if ample + rules.GRANULARITY_BYTES <= available else want
        # Where that is not to be had in one piece, what is free in whole pages: the rest is held already.
        pages = memory.free_bytes // rules.GRANULARITY_BYTES * rules.GRANULARITY_BYTES
        for size in (first, min(want, pages)):
            with torch.cuda.stream(scheduler.engine.stream), contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(size, dtype=torch.uint8, device=scheduler.device)
                return True
        return False

    def _decode_memory(self) -> list[Any]:
        """Blocks as large as what a decode step without a graph may need, as far as the allocator has them.

        A step of n requests holds no more than a chunk of n tokens. Whoever waits for memory may take all that is
        given back, and the requests that are being answered are to go on.
        """
        import torch

        scheduler = self._scheduler
        tokens = max(self._align, int(scheduler.config.max_running_req))
        sizes = [_SMALL_BYTES] * _SMALL_BLOCKS + [self._needs.held_at(tokens)]
        blocks = []
        with torch.cuda.stream(scheduler.engine.stream), contextlib.suppress(torch.OutOfMemoryError):
            for size in sizes:
                blocks.append(torch.empty(size, dtype=torch.uint8, device=scheduler.device))
        return blocks

    def _memory(self) -> rules.Memory:
        free, unused = self._engine.meter.obtainable()
        return rules.Memory(free, max(0, unused - self._stuck))

    def _why(self, tokens: int) -> str:
        """Need, what there is, and who else holds memory."""
        free, unused = self._engine.meter.obtainable()
        others = self._engine.meter.neighbours()
        largest = max(others.bytes_by_pid.items(), key=lambda item: item[1], default=None)
        held = f"; process {largest[0]} holds {mib(largest[1])}" if largest else ""
        available = free + max(0, unused - self._stuck)
        return f"a chunk of {tokens} needs up to {mib(self._needs.at(tokens))}, {mib(available)} can be had{held}"

    def _refuse(self, tokens: int) -> None:
        """End the requests of this pass, by the engine's own way to end one, with an error of their own."""
        from freetoken.message import AbortBackendMsg, ErrorReplyMsg

        scheduler, left = self._scheduler, tokens
        smallest = min(tokens, self._align)
        why = f"{REFUSED} of {smallest} tokens: {self._why(smallest)}; try again later"
        refused = []
        for pending in list(scheduler.prefill_manager.pending_list):
            if left < 1:
                break
            left -= _left(pending)
            refused.append(pending.uid)
        for uid in refused:
            scheduler._process_one_msg(AbortBackendMsg(uid=uid))
            # The client did not ask for this: its answer is the error, and no abort is confirmed.
            scheduler._pending_abort_acks.discard(uid)
            scheduler._abort_tombstones.pop(uid, None)
        self.counters.requests_refused += len(refused)
        self._on_count(self.counters)
        self._say(f"guard: {len(refused)} requests refused: {why}")
        if scheduler.config.offline_mode:  # ``LLM``: its caller is right here, and knows no error replies
            raise PrefillOOMError(why)
        scheduler.send_result([ErrorReplyMsg(uid=uid, error=why, code=CODE) for uid in refused])

    def _say_shrunk(self, tokens: int, found: int) -> None:
        if (now := time.monotonic()) - self._shrunk_said > _QUIET_SECONDS:
            self._shrunk_said = now
            self._say(f"guard: {tokens} tokens wait and {found} fit now ({self._why(tokens)})")

    def _say(self, text: str) -> None:
        if self._engine.rank == 0:
            self._log.warning(f"{text}; since the start: {self.counters.text()}")

    # After a miss ----------------------------------------------------------------------------------------------

    def _miss(self, batch: Any, error: Exception) -> PrefillOOMError:
        """A prefill ran out of memory all the same: the engine ends by it, and says what was predicted."""
        self.counters.misses += 1
        self._on_count(self.counters)
        tokens = sum(int(request.extend_len) for request in batch.reqs)
        text = (
            f"a prefill chunk ran out of memory although it was predicted to fit.\n"
            f"  chunk        {tokens} tokens of {len(batch.reqs)} prompts\n"
            f"  predicted    {mib(self._needs.at(tokens))} at most\n"
            f"  failed with  {str(error).splitlines()[0]}\n"
            "Please report this, with the record (`prefill-probe show --json`)."
        )
        named = PrefillOOMError(text)
        self._log.error(f"PrefillOOMError: {text}")
        self._on_miss(text)
        return named


def _left(pending: Any) -> int:
    """Tokens of a waiting request that are still to be processed; cached ones count, for they are not known yet."""
    done = pending.chunked_req.cached_len if pending.chunked_req is not None else 0
    return max(1, int(pending.input_len) - int(done))


def _waiting(manager: Any) -> int:
    """Tokens that wait, as ``_left`` counts them."""
    return sum(map(_left, manager.pending_list))
