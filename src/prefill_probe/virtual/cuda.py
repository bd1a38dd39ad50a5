"""What ``torch.cuda`` and ``torch`` answer while a virtual GPU is active."""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from prefill_probe.virtual.device import Device
from prefill_probe.virtual.history import History

# What the driver would say of its version; engines only ask whether it is recent enough.
CUDA_VERSION = "13.0"
# Positions of the CUDA and the meta device in c10's list of device types.
_CUDA_GUARD, _META_GUARD = 1, 14
_UUID = uuid.UUID("00000000-0000-4000-8000-000000000000")


class Calls(TorchFunctionMode):  # type: ignore[misc]
    """Rewrites the arguments of torch functions: "cuda" is the first device, and host memory is not pinned."""

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.device("cuda", 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func in _PINNED:
            return _PINNED[func](args[0])
        if func in _INDEXING and args[0].is_cuda:
            return func(args[0], self._positions(args[1]), *args[2:])
        if any(type(value) in _NAMES and self._means_cuda(value) for value in args):
            args = tuple(self._device if self._means_cuda(value) else value for value in args)
        if kwargs:
            if self._means_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": self._device}
            if "pin_memory" in kwargs:
                kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if func in _FROM_DATA and kwargs.get("device") is not None:
                # Built in C++ below all modes: on the host first, and then copied.
                target = kwargs["device"]
                return func(*args, **{**kwargs, "device": "cpu"}).to(target)
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is torch.Tensor.new_tensor and "device" not in (kwargs or {}):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **(kwargs or {})}).to(args[0].device)
        return func(*args, **(kwargs or {}))

    def _positions(self, index: Any) -> Any:
        """An index with lists as tensors, which C++ would make of them below all modes."""
        if isinstance(index, list):
            return torch.tensor(index).to(self._device)
        if isinstance(index, tuple):
            return tuple(self._positions(each) if isinstance(each, list) else each for each in index)
        return index

    @staticmethod
    def _means_cuda(value: Any) -> bool:
        if isinstance(value, torch.device):
            return value.type == "cuda" and value.index is None
        return isinstance(value, str) and value == "cuda"


_NAMES = (str, torch.device)
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.Tensor.new_tensor}
_PINNED: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.pin_memory: lambda tensor: tensor,
    torch.Tensor.is_pinned: lambda tensor: tensor.device.type == "cpu",
}


class Stream:
    """A stream: a name for the allocator, which keeps blocks by stream. Work on it is done at once."""

    device_of_all: Device

    def __init__(self, device: Any = None, priority: int = 0, stream_ptr: int | None = None, **_: Any) -> None:
        self.cuda_stream = self.device_of_all.new_stream() if stream_ptr is None else stream_ptr
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self.stream_id = self.cuda_stream
        self.priority = priority

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __enter__(self) -> Stream:
        self._outer = self.device_of_all.stream
        self.device_of_all.stream = self.cuda_stream
        return self

    def __exit__(self, *exc: object) -> None:
        self.device_of_all.stream = self._outer

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class Event:
    """An event that has always happened, 0 ms after any other."""

    cuda_event = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class Graph:
    """A captured graph: its memory comes from a pool of the graph's own, and its replay does nothing."""

    device_of_all: Device
    _handles = 0

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: int | None = None

    @classmethod
    def new_handle(cls) -> tuple[int, int]:
        cls._handles += 1
        return (0, cls._handles)

    def pool(self) -> tuple[int, int]:
        assert self._pool is not None
        return (0, self._pool)

    @contextlib.contextmanager
    def capture(self, pool: tuple[int, int] | None) -> Iterator[None]:
        self._pool = (pool or self.new_handle())[1]
        with self.device_of_all.allocator.capture(self._pool):
            yield

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        if self._pool is not None:
            self.device_of_all.allocator.forget_graph(self._pool)
            self._pool = None

    def __del__(self) -> None:
        self.reset()


class _Entered:
    """A context that is entered as often as one likes; ``stream`` is made current inside."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream
        self._outer: list[int] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            device = self.stream.device_of_all
            self._outer.append(device.stream)
            device.stream = self.stream.cuda_stream

    def __exit__(self, *exc: object) -> None:
        if self.stream is not None:
            self.stream.device_of_all.stream = self._outer.pop()


@contextlib.contextmanager
def answered(device: Device) -> Iterator[None]:
    """``torch.cuda`` speaks of ``device`` while the block runs, and is as before afterwards.

    Raises:
        RuntimeError: this process has a GPU in use already, or this torch cannot have a virtual one.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("a virtual GPU needs a process that has not used a GPU")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_device_guard())
        for name, value in _answers(device).items():
            owner: Any = torch
            *path, attribute = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            stack.enter_context(mock.patch.object(owner, attribute, value, create=True))
        stack.enter_context(Calls())
        yield


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Let C++ code name CUDA devices: a torch without CUDA refuses any tensor index on them.

    c10 keeps one object for each device type that switches between devices. The meta device's does nothing; it is
    entered for CUDA too.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        guards = (ctypes.c_void_p * (_META_GUARD + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    except ValueError:
        raise RuntimeError(f"this torch ({torch.__version__}) cannot have a virtual GPU: no device guards") from None
    before = guards[_CUDA_GUARD]
    guards[_CUDA_GUARD] = guards[_META_GUARD]
    try:
        yield
    finally:
        guards[_CUDA_GUARD] = before


def _answers(device: Device) -> dict[str, Any]:
    """By dotted name below ``torch``: what stands in for it."""
    card, allocator = device.card, device.allocator
    stream_class = type("Stream", (Stream,), {"device_of_all": device})
    graph_class = type("CUDAGraph", (Graph,), {"device_of_all": device})
    state = SimpleNamespace(initialized=False)
    properties = SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.total_bytes,
        multi_processor_count=card.multiprocessors,
        is_integrated=int(card.integrated),
        is_multi_gpu_board=0,
        uuid=_UUID,
        warp_size=32,
        max_threads_per_multi_processor=1536,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=card.shared_bytes,
        shared_memory_per_multiprocessor=card.shared_bytes + 1024,
        L2_cache_size=64 << 20,
        gcnArchName="",
    )

    # Each name gets a function of its own: torch keeps tables of its functions by identity.
    def use() -> Callable[..., None]:
        return lambda *_, **__: setattr(state, "initialized", True)

    def stream_of(handle: int) -> Stream:
        return stream_class(stream_ptr=handle)  # type: ignore[no-any-return]

    def set_stream(stream: Stream) -> None:
        device.stream = stream.cuda_stream

    @contextlib.contextmanager
    def graph(cuda_graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        allocator.release_unused()
        with _Entered(stream or stream_class()), cuda_graph.capture(pool):
            yield

    def set_allocator(settings: str) -> None:
        for setting in settings.split(","):
            name, _, value = setting.partition(":")
            if name.strip() == "expandable_segments":
                allocator.expandable = value.strip().lower() == "true"

    def statistics(*_: Any, **__: Any) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": allocator.allocated,
            "allocated_bytes.all.peak": allocator.peak_allocated,
            "reserved_bytes.all.current": allocator.reserved,
            "reserved_bytes.all.peak": allocator.peak_reserved,
            "allocation.all.allocated": allocator.allocations,
        }

    def nested_statistics(*_: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in statistics().items():
            family, kind, which = name.split(".")
            found.setdefault(family, {}).setdefault(kind, {})[which] = value
        return found

    def segments() -> list[dict[str, Any]]:
        """Of the private pools alone; the shared one is asked for by nobody."""
        pools = allocator.graph_pools()
        return [{"device": 0, "segment_pool_id": (0, key), "total_size": size} for key, size in pools.items()]

    history = History(allocator)

    def nothing() -> Callable[..., None]:
        return lambda *_, **__: None

    ordinary: dict[str, Any] = {
        "init": use(),
        "_lazy_init": use(),
        "is_available": lambda: True,
        "is_initialized": lambda: state.initialized,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": use(),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: card.name,
        "get_device_capability": lambda *_: card.capability,
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"],
        "can_device_access_peer": lambda *_: False,
        "mem_get_info": lambda *_: (device.free_bytes, card.total_bytes),
        "memory_allocated": lambda *_: allocator.allocated,
        "memory_reserved": lambda *_: allocator.reserved,
        "max_memory_allocated": lambda *_: allocator.peak_allocated,
        "max_memory_reserved": lambda *_: allocator.peak_reserved,
        "memory_stats": statistics,
        "memory_stats_as_nested_dict": nested_statistics,
        "reset_peak_memory_stats": lambda *_: allocator.forget_peaks(),
        "empty_cache": allocator.release_unused,
        "synchronize": nothing(),
        "ipc_collect": nothing(),
        "manual_seed": nothing(),
        "manual_seed_all": nothing(),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": nothing(),
        "Stream": stream_class,
        "ExternalStream": stream_class,
        "Event": Event,
        "CUDAGraph": graph_class,
        "graph": graph,
        "graph_pool_handle": Graph.new_handle,
        "stream": _Entered,
        "current_stream": lambda *_: stream_of(device.stream),
        "default_stream": lambda *_: stream_of(0),
        "set_stream": set_stream,
        "device": lambda *_: _Entered(),
        "device_of": lambda *_: _Entered(),
        "is_current_stream_capturing": lambda: allocator.capturing,
        "is_bf16_supported": lambda *_, **__: True,
        "utilization": lambda *_: 0,
        "nvtx.range": lambda *_, **__: contextlib.nullcontext(),
        "nvtx.range_push": nothing(),
        "nvtx.range_pop": nothing(),
        "nvtx.mark": nothing(),
        "memory._set_allocator_settings": set_allocator,
        "memory._record_memory_history": history.record,
        "memory._snapshot": lambda *_, **__: {"device_traces": [history.events]},
        "memory_snapshot": segments,
        "memory.mem_get_info": lambda *_: (device.free_bytes, card.total_bytes),
    }
    return {f"cuda.{name}": value for name, value in ordinary.items()} | {"version.cuda": CUDA_VERSION}
