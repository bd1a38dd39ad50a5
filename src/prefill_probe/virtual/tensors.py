"""Tensors of the virtual GPU, and what operators on them do.

A device tensor has the device, shape, dtype and strides of a CUDA tensor, and holds another tensor that stands for its
memory:

* a small one (or one of whole numbers, which engines compute indices with) a tensor in host memory, computed for real;
* a large one a tensor on the meta device, which has no memory at all.

An operator runs on what its tensors hold: for real where all of it is in host memory, else on the meta device. What
is small and comes out of a large tensor is not known; it reads as zeros and is marked so. An operator whose result
has a size that depends on values which are not known raises ``UntraceableError`` with its name.

Every new storage is one block of the device's allocator, until its last reference is gone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prefill_probe.sizes import MIB
from prefill_probe.virtual.allocator import Block
from prefill_probe.virtual.device import Device
from prefill_probe.virtual.errors import UntraceableError

# Up to these sizes a storage is kept in host memory and computed for real: whole numbers whose values are known (the
# tables and free lists of caches), whole numbers that are not, and everything else.
REAL_BYTES_INDEX = 256 * MIB
# The same for zeros, whose memory is not touched before something else is written to it.
REAL_BYTES_ZEROS = 1024 * MIB
REAL_BYTES_UNKNOWN_INDEX = 1 * MIB
REAL_BYTES_OTHER = 64 * 1024  # A host tensor of other types above this size holds weights: its memory is not touched.
HOST_BYTES_OTHER = 1 * MIB
_INDEX_TYPES = (torch.int32, torch.int64, torch.bool, torch.int16)

_aten = torch.ops.aten
# Operators that a matrix library answers, which keeps a workspace.
_BLAS = {
    _aten.mm,
    _aten.addmm,
    _aten.bmm,
    _aten.baddbmm,
    _aten.addbmm,
    _aten.addmv,
    _aten.mv,
    _aten._scaled_mm,
    _aten._addmm_activation,
    _aten._int_mm,
}
# Operators that are composed of others where a device has no kernel of its own for them; a GPU has (torch 2.8 on).
_FUSED = {op for name in ("_fused_rms_norm",) if (op := getattr(_aten, name, None)) is not None}
# Operators that fill memory without looking at it: where nothing is kept, there is nothing to do.
_UNINITIALIZED = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
# Operators that give a host tensor its contents.
_CONTENTS = {_aten.zero_, _aten.fill_, _aten.random_, _aten.normal_, _aten.uniform_, _aten.copy_}
# Operators that make a tensor of one value, which does not depend on the tensor that gives its shape.
_FILLS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    _aten.new_zeros: lambda args: 0,
    _aten.new_ones: lambda args: 1,
    _aten.new_full: lambda args: args[2],
    _aten.zeros_like: lambda args: 0,
    _aten.ones_like: lambda args: 1,
    _aten.full_like: lambda args: args[1],
}
# Operators whose result, or its shape, depends on values.
_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_PINNING = {_aten.pin_memory, _aten._pin_memory}


_NOTHING = contextlib.nullcontext()


class DeviceTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor of the virtual GPU; ``held`` stands for its memory."""

    held: torch.Tensor
    device_memory: Tracing

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor, device_memory: Tracing) -> DeviceTensor:
        # Not an inference tensor, wherever it is made: those and ordinary ones cannot be views of one another.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
            tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                layout=held.layout,
                device=device_memory.torch_device,
                requires_grad=False,
            )
        tensor.held = held
        tensor.device_memory = device_memory
        return tensor

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in _flat(args, kwargs or {}):
            if isinstance(value, DeviceTensor):
                return value.device_memory.answer(func, args, kwargs or {})
        raise AssertionError("no device tensor in an operator on device tensors")

    def data_ptr(self) -> int:
        """Its address on the virtual device; no memory is there."""
        offset: int = self.held.storage_offset() * self.held.element_size()
        return self.device_memory.address_of(self.held) + offset

    def untyped_storage(self) -> Any:
        """What stands for its storage, as long as that; where it is, ``data_ptr`` says."""
        return self.held.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Nothing: memory is free as soon as it is freed, whatever other streams do with it."""

    def tolist(self) -> Any:
        self.device_memory.need_known(self, "tolist")
        return self.held.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {'real' if _is_real(self.held) else 'shape only'})"


class Tracing(TorchDispatchMode):  # type: ignore[misc]
    """Answers every operator on the virtual GPU while it is active."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.torch_device = torch.device("cuda", 0)
        # Blocks by the identity of what stands for the storage.
        self._blocks: dict[int, Block] = {}
        self._unknown: set[int] = set()
        self.operators = 0

    # Storages --------------------------------------------------------------------------------------------------

    def address_of(self, held: torch.Tensor) -> int:
        """The address of a storage on the virtual device (0 for an empty one)."""
        block = self._blocks.get(held.untyped_storage()._cdata)
        return block.address if block is not None else 0

    def _own(self, held: torch.Tensor, *, known: bool) -> DeviceTensor:
        """The device tensor for ``held``; a storage that is new takes a block of the allocator."""
        storage = held.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            size = storage.nbytes()
            if size > 0:
                self._blocks[key] = self.device.allocate(size)
                weakref.finalize(storage, self._forget, key).atexit = False
                if not known:
                    self._unknown.add(key)
        return DeviceTensor(held, self)

    def _forget(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        self._unknown.discard(key)
        if block is not None:
            self.device.allocator.free(block)

    def _known(self, held: torch.Tensor) -> bool:
        return held.device.type == "cpu" and held.untyped_storage()._cdata not in self._unknown

    def need_known(self, tensor: DeviceTensor, operator: str) -> None:
        """Raises ``UntraceableError`` where the values of ``tensor`` are not known."""
        if not self._known(tensor.held) and tensor.numel():
            raise UntraceableError(operator, "it reads values that only a GPU would have computed")

    # Operators -------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, for seconds, to say that this is not to be compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one operator."""
        # aten::to.device alone takes it by position.
        device = kwargs.get("device") or next((value for value in args if isinstance(value, torch.device)), None)
        to_device = device is not None and torch.device(device).type == "cuda"
        tensors = [value for value in _flat(args, kwargs) if isinstance(value, torch.Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if not on_device and not to_device:
            return self._on_host(func, args, kwargs)
        packet = func.overloadpacket
        if _is_composed(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        self.operators += 1
        if packet is _aten._to_copy and device is not None and not to_device:
            return self._to_host(func, args, kwargs)
        if packet is _aten.copy_ and not isinstance(args[0], DeviceTensor):
            return self._into_host(args)
        if packet in _BLAS:
            self.device.need_blas_workspace()
        if packet in _PINNING or packet is _aten.is_pinned:
            raise RuntimeError("only host tensors can be pinned")
        return self._on_device(func, args, kwargs, on_device)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator without device tensors. Host memory is not pinned, and that of weights is not filled."""
        packet = func.overloadpacket
        if packet is _aten.is_pinned:
            return False
        if packet in _PINNING:
            return args[0]
        if packet in _CONTENTS and isinstance(args[0], torch.Tensor) and _is_bulk(args[0]):
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": None}
        return func(*args, **kwargs)

    def _to_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        source = args[0].held
        if _is_real(source):
            return func(source, **_placed(kwargs, "cpu"))
        return torch.zeros_like(_shapes(func, (source,), kwargs), device="cpu")

    def _into_host(self, args: tuple[Any, ...]) -> torch.Tensor:
        target: torch.Tensor = args[0]
        source = args[1].held
        if _is_real(source):
            target.copy_(source)
        return target

    def _on_device(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: list[DeviceTensor]
    ) -> Any:
        if func.overloadpacket is _aten.index:
            args = (args[0], self._by_position(args[1]))
        elif _depends_on_values(func):
            for tensor in on_device:
                self.need_known(tensor, func.name())
            return self._for_real(func, args, kwargs, on_device)
        real = all(_is_real(tensor.held) for tensor in on_device) and _has_host_kernel(func)
        if real and (_is_view(func) or _writes(func) or self._stays_small(func, args, kwargs, on_device)):
            try:
                return self._for_real(func, args, kwargs, on_device)
            except NotImplementedError:
                pass  # The host's kernel lacks this dtype (Float8_e8m0fnu has few).
        return self._by_shape(func, args, kwargs, on_device)

    def _by_position(self, indices: list[Any]) -> list[Any]:
        """Indices of ``x[...]`` with masks written as positions, whose number depends on their values."""
        positions: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                if isinstance(index, DeviceTensor):
                    self.need_known(index, "aten::index with a mask")
                found = _held(index).nonzero().unbind(1)
                positions += [self._own(each.contiguous(), known=True) for each in found]
            else:
                positions.append(index)
        return positions

    def _for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: list[DeviceTensor]) -> Any:
        """The results computed in host memory."""
        uninitialized = func.overloadpacket in _UNINITIALIZED
        sources = [tensor for tensor in on_device if tensor is not args[0]] if _overwrites(func) else on_device
        known = not uninitialized and all(self._known(tensor.held) for tensor in sources)
        if uninitialized or func.overloadpacket is _aten.zeros:
            return self._results(_untouched_zeros(_shapes(func, *_swap((args, kwargs), _on_meta))), {}, known)
        held_args, held_kwargs = _swap((args, kwargs), _held)
        result = func(*held_args, **_placed(held_kwargs, "cpu"))
        self._mark_written(func, args, kwargs, known)
        return self._results(result, {id(tensor.held): tensor for tensor in on_device}, known)

    def _stays_small(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: list[DeviceTensor]
    ) -> bool:
        """Whether the results of an operator on small tensors are small too."""
        if on_device and func.overloadpacket not in _SIZED:
            bound = math.prod(max(tensor.numel(), 1) for tensor in on_device)
            if bound * 8 <= REAL_BYTES_OTHER:
                return True
        shapes = _shapes(func, *_swap((args, kwargs), _on_meta))
        if func.overloadpacket is _aten.zeros and shapes.dtype in _INDEX_TYPES:
            return bool(shapes.untyped_storage().nbytes() <= REAL_BYTES_ZEROS)
        known = func.overloadpacket not in _UNINITIALIZED and all(self._known(tensor.held) for tensor in on_device)
        return all(_keeps_values(value, known) for value in _flat((shapes,), {}) if isinstance(value, torch.Tensor))

    def _by_shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: list[DeviceTensor]) -> Any:
        """The results by their shapes alone."""
        owners: dict[int, DeviceTensor] = {}
        on_meta: dict[int, torch.Tensor] = {}

        def as_meta(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in on_meta:
                on_meta[id(tensor)] = held = _on_meta(tensor)
                if isinstance(tensor, DeviceTensor):
                    owners[id(held)] = tensor
            return on_meta[id(tensor)]

        result = _shapes(func, *_swap((args, kwargs), as_meta))
        self._mark_written(func, args, kwargs, False)
        fill = _FILLS[func.overloadpacket](args) if func.overloadpacket in _FILLS else None
        inputs = {tensor.held.untyped_storage()._cdata for tensor in on_device}

        def with_memory(value: torch.Tensor) -> torch.Tensor:
            """The same in host memory, if it is new and small."""
            new = id(value) not in owners and value.untyped_storage()._cdata not in inputs
            if not new or not _keeps_values(value, fill is not None):
                return value
            held = _untouched_zeros(value)
            return held.fill_(fill) if fill else held

        return self._results(_each(result, with_memory), owners, fill is not None)

    def _mark_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: bool) -> None:
        """Note whether the values that an operator wrote into its arguments are known."""
        if not _writes(func):
            return
        for argument, value in zip(func._schema.arguments, args):  # noqa: B905  (trailing defaults are not passed)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, DeviceTensor):
                self._mark(value, known)
        for argument in func._schema.arguments:
            value = kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, DeviceTensor):
                self._mark(value, known)

    def _mark(self, tensor: DeviceTensor, known: bool) -> None:
        key = tensor.held.untyped_storage()._cdata
        if known:
            self._unknown.discard(key)
        elif key in self._blocks:
            self._unknown.add(key)

    def _results(self, result: Any, owners: dict[int, DeviceTensor], known: bool) -> Any:
        def wrap(value: torch.Tensor) -> torch.Tensor:
            owner = owners.get(id(value))
            if owner is not None:
                if owner.shape != value.shape:
                    raise UntraceableError("resize_", "it changes the shape of a tensor in place")
                return owner
            return self._own(value, known=known)

        return _each(result, wrap)


_SIZED = {
    _aten.repeat,
    _aten.repeat_interleave,
    _aten.new_zeros,
    _aten.new_ones,
    _aten.new_full,
    _aten.new_empty,
    _aten.constant_pad_nd,
}


def _flat(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterable[Any]:
    """The values of an operator's arguments, those inside lists too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An operator's result with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_each(item, change) for item in value])
    return value


def _swap(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = arguments
    return (
        tuple(_each(value, change) for value in args),
        {name: _each(value, change) for name, value in kwargs.items()},
    )


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.held if isinstance(tensor, DeviceTensor) else tensor


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DeviceTensor):
        held = tensor.held
        return held if held.device.type == "meta" else held.to("meta")
    # A host scalar mixes with device tensors as a number does.
    return tensor if tensor.dim() == 0 else tensor.to("meta")


def _is_real(held: torch.Tensor) -> bool:
    return bool(held.device.type == "cpu")


def _untouched_zeros(shape: torch.Tensor) -> torch.Tensor:
    """Zeros of this shape, strides and dtype, in host memory that the system has only promised where it is large."""
    size = shape.untyped_storage().nbytes()
    if size < MIB // 16:
        memory = torch.zeros(size, dtype=torch.uint8, device="cpu")
    else:
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    held = torch.empty(0, dtype=shape.dtype, device="cpu")
    return held.set_(memory.untyped_storage(), shape.storage_offset(), shape.size(), shape.stride())


def _keeps_values(shape: torch.Tensor, known: bool) -> bool:
    """Whether a new storage of this shape and dtype is kept in host memory."""
    limit = REAL_BYTES_OTHER
    if shape.dtype in _INDEX_TYPES:
        limit = REAL_BYTES_INDEX if known else REAL_BYTES_UNKNOWN_INDEX
    return bool(shape.untyped_storage().nbytes() <= limit)


def _is_bulk(host: torch.Tensor) -> bool:
    """Whether a host tensor is one of weights: large, and not of whole numbers that indices are made of."""
    limit = REAL_BYTES_INDEX if host.dtype in _INDEX_TYPES else HOST_BYTES_OTHER
    return bool(host.device.type == "cpu" and host.numel() * host.element_size() > limit)


def _placed(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    """The same with results on another device, and without what only real copies to a GPU know."""
    kept = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "non_blocking")}
    return {**kept, "device": torch.device(device)} if "device" in kwargs else kept


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operator on the meta device.

    Raises:
        UntraceableError: it has no rule for shapes.
    """
    try:
        return func(*args, **_placed(kwargs, "meta"))
    except NotImplementedError:
        raise UntraceableError(func.name(), "it has no rule for the shape of its result") from None


# An operator is called many thousand times: what it is, is looked up once.


@functools.cache
def _is_composed(func: Any) -> bool:
    """Whether an operator is made of others, which are answered one by one."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.overloadpacket not in _FUSED and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@functools.cache
def _depends_on_values(func: Any) -> bool:
    return bool(_BY_VALUE.intersection(func.tags))


@functools.cache
def _has_host_kernel(func: Any) -> bool:
    """Whether an operator can be computed in host memory; a few are a GPU's alone."""
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"))


@functools.cache
def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


@functools.cache
def _overwrites(func: Any) -> bool:
    """Whether what an operator writes does not depend on what was there."""
    return func.overloadpacket in (_aten.copy_, _aten.fill_, _aten.zero_)


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
