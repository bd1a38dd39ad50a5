"""A model of the CUDA caching allocator: which bytes it hands out, and which it takes from the device to do so.

Rules and constants are those of PyTorch's native allocator (``c10/cuda/CUDACachingAllocator.cpp``, read at 2.11):

* a request is rounded up to 512 bytes;
* requests up to 1 MiB are served from the small pool, which grows by 2 MiB; larger ones from the large pool, which
  grows by 20 MiB, or for requests of 10 MiB and more by the request rounded up to 2 MiB;
* the smallest free block of the request's stream that is large enough is taken, and split;
* a freed block is merged with free neighbours;
* with expandable segments each pool and stream has one range of addresses, into which pages (2 MiB small, 20 MiB
  large) are mapped at its end as it grows; a free block at the end is completed by new pages;
* before it gives up, the allocator hands all unused blocks back to the device and tries once more;
* while a graph is captured, blocks come from a pool of that graph's own, which stays with the graph.

Times are not modelled: a block that another stream has used is free as soon as it is freed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prefill_probe.sizes import MIB

ROUND = 512
SMALL_REQUEST = 1 * MIB
SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB
OWN_SEGMENT_REQUEST = 10 * MIB
OWN_SEGMENT_ROUND = 2 * MIB
# Addresses that no process uses; every segment gets its own range.
_FIRST_ADDRESS = 0x7F00_0000_0000
# An expandable segment reserves addresses for an eighth more than the device holds.
_ADDRESS_SHARE = 8


class OutOfDeviceMemory(Exception):
    """The device has no room for a request, also after unused blocks were given back.

    Attributes:
        requested_bytes: what was asked of the device: the request, rounded as the pool grows.
        free_bytes: free on the device then.
    """

    def __init__(self, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{requested_bytes} bytes requested, {free_bytes} bytes free")
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes


def round_up(size: int, unit: int) -> int:
    """``size`` rounded up to a multiple of ``unit``."""
    return -(-size // unit) * unit


def growth_of(size: int) -> int:
    """Bytes by which a pool grows for a rounded request of ``size`` bytes."""
    if size <= SMALL_REQUEST:
        return SMALL_PAGE
    if size < OWN_SEGMENT_REQUEST:
        return LARGE_PAGE
    return round_up(size, OWN_SEGMENT_ROUND)


@dataclass
class Segment:
    """A range of device addresses; ``page`` is 0 where it is mapped as a whole and cannot grow."""

    start: int
    size: int
    page: int = 0


@dataclass(eq=False)
class Block:
    """A piece of a segment: handed out, free, or (expandable segments) not backed by memory.

    Attributes:
        requested: bytes asked for, before rounding.
        before, after: its neighbours in the segment.
    """

    stream: int
    pool: Pool
    segment: Segment
    address: int
    size: int
    allocated: bool = False
    mapped: bool = True
    requested: int = 0
    before: Block | None = None
    after: Block | None = None

    @property
    def alone(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


@dataclass(eq=False)
class Pool:
    """The free blocks of one size class, ordered as the allocator searches them.

    Attributes:
        page: by which it grows.
        reserved: bytes that it has taken from the device.
        free: (stream, size, address, block).
        unmapped: (stream, address, block).
    """

    page: int
    reserved: int = 0
    free: list[tuple[int, int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, int, Block]] = field(default_factory=list)

    def put(self, block: Block) -> None:
        """Add a block to the free ones, or to those without memory."""
        if block.mapped:
            insort(self.free, (block.stream, block.size, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def take(self, block: Block) -> None:
        """Remove a block that ``put`` added and that has not changed since."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]


@dataclass(eq=False)
class _Pools:
    """The two pools of the process, or of one captured graph."""

    small: Pool = field(default_factory=lambda: Pool(SMALL_PAGE))
    large: Pool = field(default_factory=lambda: Pool(LARGE_PAGE))
    users: int = 0


class Allocator:
    """The caching allocator of one process on one device.

    Args:
        device_free: bytes that the device has left beside what this allocator reserves, as a function, so that what
            others take counts at once.
        total: bytes of the device; an expandable segment is a little larger.
        expandable: the allocator setting ``expandable_segments``.

    Attributes:
        allocated, reserved: bytes handed out, and bytes taken from the device.
        allocations: how many blocks were handed out so far.
        on_event: called with ``"alloc"`` or ``"free_completed"`` and the block, if it is not None.
        peak_allocated, peak_reserved: their highest values since ``forget_peaks``.
    """

    def __init__(self, device_free: Callable[[int], int], total: int, *, expandable: bool = False) -> None:
        self._device_free = device_free
        self._total = total
        self.expandable = expandable
        self._pools = _Pools()
        self._graphs: dict[int, _Pools] = {}
        self._capturing: int | None = None
        self._next_address = _FIRST_ADDRESS
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.allocations = 0
        self.on_event: Callable[[str, Block], None] | None = None

    # What callers use ------------------------------------------------------------------------------------------

    def allocate(self, size: int, stream: int = 0) -> Block:
        """A block of at least ``size`` bytes for ``stream``.

        Raises:
            ValueError: less than one byte.
            OutOfDeviceMemory: there is no room.
        """
        if size < 1:
            raise ValueError(f"a block has at least one byte, not {size}")
        rounded = round_up(size, ROUND)
        pools = self._pools if self._capturing is None else self._graphs[self._capturing]
        pool = pools.small if rounded <= SMALL_REQUEST else pools.large
        growth = growth_of(rounded)
        block = self._find(pool, rounded, stream) or self._grow(pool, growth, stream)
        if block is None and self._capturing is None:
            self.release_unused()
            block = self._grow(pool, growth, stream)
        if block is None:
            raise OutOfDeviceMemory(growth, self.device_free)
        block = self._split(block, rounded)
        block.allocated, block.requested = True, size
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.allocations += 1
        if self.on_event is not None:
            self.on_event("alloc", block)
        return block

    def free(self, block: Block) -> None:
        """Take back a block that ``allocate`` gave.

        Raises:
            ValueError: it was taken back already.
        """
        if not block.allocated:
            raise ValueError("this block is free already")
        block.allocated = False
        self.allocated -= block.size
        if self.on_event is not None:
            self.on_event("free_completed", block)
        self._merge_and_put(block)

    def release_unused(self) -> None:
        """Give unused memory back to the device (``empty_cache``): whole segments, of expandable ones whole pages."""
        self._release(self._pools)
        for key in [key for key, pools in self._graphs.items() if not pools.users]:
            pools = self._graphs[key]
            self._release(pools)
            if not (pools.small.free or pools.large.free):
                del self._graphs[key]

    @contextmanager
    def capture(self, pool: int) -> Iterator[None]:
        """Serve requests from the pool ``pool`` of captured graphs while the block runs; it gets one more user."""
        if self._capturing is not None:
            raise RuntimeError("a graph is being captured already")
        self._graphs.setdefault(pool, _Pools()).users += 1
        self._capturing = pool
        try:
            yield
        finally:
            self._capturing = None

    def forget_graph(self, pool: int) -> None:
        """A graph of ``pool`` is gone; when all are, ``release_unused`` gives the pool back."""
        self._graphs[pool].users -= 1

    def forget_peaks(self) -> None:
        """Start the peaks again from what is in use."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self._capturing is not None

    @property
    def device_free(self) -> int:
        """Bytes that the device has left."""
        return self._device_free(self.reserved)

    def graph_bytes(self) -> int:
        """Bytes that the pools of captured graphs hold: free ones and, where they are whole segments, used ones."""
        return sum(
            block.size
            for pools in self._graphs.values()
            for pool in (pools.small, pools.large)
            for _, _, _, block in pool.free
        )

    def graph_pools(self) -> dict[int, int]:
        """Bytes that the pools of captured graphs have taken from the device, by pool."""
        return {key: pools.small.reserved + pools.large.reserved for key, pools in self._graphs.items()}

    # How it works ----------------------------------------------------------------------------------------------

    def _reserve(self, pool: Pool, size: int) -> bool:
        """Take ``size`` bytes from the device for ``pool``, if it has them."""
        if size > self.device_free:
            return False
        pool.reserved += size
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _give_back(self, pool: Pool, size: int) -> None:
        pool.reserved -= size
        self.reserved -= size

    def _find(self, pool: Pool, size: int, stream: int) -> Block | None:
        """The smallest free block that is large enough; of expandable ones, rather one with little room to grow."""
        free = pool.free
        index = bisect_left(free, (stream, size, 0))
        if index == len(free) or free[index][0] != stream:
            return None
        if self.expandable:
            while index + 1 < len(free) and free[index + 1][0] == stream and free[index][3].segment.page:
                if _room(free[index + 1][3]) >= _room(free[index][3]):
                    break
                index += 1
        block = free[index][3]
        del free[index]
        return block

    def _grow(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A free block of at least ``size`` bytes, from the device; None if it has no room."""
        if self.expandable:
            return self._extend(pool, size, stream)
        if not self._reserve(pool, size):
            return None
        segment = self._new_segment(size)
        return Block(stream, pool, segment, segment.start, size)

    def _new_segment(self, size: int, page: int = 0) -> Segment:
        segment = Segment(self._next_address, size, page)
        self._next_address += size
        return segment

    def _extend(self, pool: Pool, size: int, stream: int) -> Block | None:
        """The same by mapping pages into an expandable segment."""
        block = self._place_to_extend(pool, size, stream)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.after
            assert after is not None  # what _place_to_extend has checked
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        pool.take(block)
        return block

    def _place_to_extend(self, pool: Pool, size: int, stream: int) -> Block:
        """A run of blocks that are free or without memory, ``size`` bytes long: its first one."""
        start = bisect_left(pool.unmapped, (stream, 0))
        for block_stream, _, unmapped in pool.unmapped[start:]:
            if block_stream != stream:
                break
            block = unmapped
            if block.before is not None and not block.before.allocated:
                block = block.before
            if _run_length(block, size) >= size:
                return block
        whole = round_up(self._total + self._total // _ADDRESS_SHARE, pool.page)
        segment = self._new_segment(max(whole, round_up(size, pool.page)), pool.page)
        block = Block(stream, pool, segment, segment.start, segment.size, mapped=False)
        pool.put(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Back the first ``size`` bytes of a block by whole pages; then it is free, merged with its neighbours."""
        pool, mapped = block.pool, round_up(size, block.segment.page)
        if not self._reserve(pool, mapped):
            return False
        pool.take(block)
        if mapped < block.size:
            start = block.address + mapped
            rest = Block(block.stream, pool, block.segment, start, block.size - mapped, mapped=False)
            _link(rest, block.after)
            _link(block, rest)
            block.size = mapped
            pool.put(rest)
        block.mapped = True
        self._merge_and_put(block)
        return True

    def _split(self, block: Block, size: int) -> Block:
        """The first ``size`` bytes of a block that is in no list; the rest is free, where it is worth keeping."""
        rest = block.size - size
        whole = block.pool.page == LARGE_PAGE and not block.segment.page
        if rest < ROUND or (whole and rest <= SMALL_REQUEST):
            return block
        first = Block(block.stream, block.pool, block.segment, block.address, size)
        _link(block.before, first)
        _link(first, block)
        block.address += size
        block.size = rest
        block.pool.put(block)
        return first

    def _merge_and_put(self, block: Block) -> None:
        """Add a block that is in no list to its pool's, merged with neighbours of its kind."""
        pool = block.pool
        for neighbour in (block.before, block.after):
            if neighbour is None or neighbour.allocated or neighbour.mapped != block.mapped:
                continue
            pool.take(neighbour)
            if neighbour is block.before:
                block.address = neighbour.address
                _link(neighbour.before, block)
            else:
                _link(block, neighbour.after)
            block.size += neighbour.size
        pool.put(block)

    def _release(self, pools: _Pools) -> None:
        for pool in (pools.large, pools.small):
            for _, _, _, block in list(pool.free):
                if block.segment.page:
                    self._unmap(block)
                elif block.alone:
                    pool.take(block)
                    self._give_back(pool, block.size)

    def _unmap(self, block: Block) -> None:
        """Give the whole pages of a free block back; what is left of it at both ends stays free."""
        page, start = block.segment.page, block.segment.start
        first = start + round_up(block.address - start, page)
        end = start + (block.address + block.size - start) // page * page
        if end <= first:
            return
        pool = block.pool
        pool.take(block)
        if first > block.address:
            head = Block(block.stream, pool, block.segment, block.address, first - block.address)
            _link(block.before, head)
            _link(head, block)
            pool.put(head)
        if end < block.address + block.size:
            tail = Block(block.stream, pool, block.segment, end, block.address + block.size - end)
            _link(tail, block.after)
            _link(block, tail)
            pool.put(tail)
        block.address, block.size, block.mapped = first, end - first, False
        self._give_back(pool, block.size)
        self._merge_and_put(block)
        if block.alone:
            pool.take(block)


def _link(first: Block | None, second: Block | None) -> None:
    """Make two blocks neighbours."""
    if first is not None:
        first.after = second
    if second is not None:
        second.before = first


def _room(block: Block) -> int:
    """Size of a block with what could be mapped behind it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _run_length(block: Block, enough: int) -> int:
    """Bytes from a block on that are not handed out, counted until there are ``enough``."""
    length, each = 0, block
    while each is not None and not each.allocated and length < enough:
        length += each.size
        each = each.after  # type: ignore[assignment]
    return length
