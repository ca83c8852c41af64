"""`no_host_waits`: fails where a step would make the host wait for the GPU, or is no work for a graph."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.imaginary_gpu import ImaginaryGPU, decomposed, is_there

_aten = torch.ops.aten
# What reads numbers on the device: to give them to the host, to know a size, or to check them.
_READERS = {
    _aten._local_scalar_dense, _aten.nonzero, _aten.nonzero_numpy, _aten.argwhere, _aten.masked_select,
    _aten._unique, _aten._unique2, _aten.unique_dim, _aten.unique_consecutive, _aten.unique_dim_consecutive,
    _aten.bincount, _aten.equal, _aten.is_nonzero, _aten.allclose, _aten.multinomial, _aten.isin,
}  # fmt: skip
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_COPIES = (_aten.copy_, _aten._to_copy, _aten._pin_memory)
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_TO_HOST = (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__array__)


class HostWait(AssertionError):
    """The host would wait for the device, or a graph would hold what it can't repeat."""


class Made:
    """The device's tensors that were made inside the guard."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Tensor]] = []

    def note(self, out: Any, given: Sequence[Any]) -> None:
        known = {id(x) for x in given}
        fresh = [x for x in tree_leaves(out) if is_there(x) and id(x) not in known]
        self._all += [weakref.ref(x) for x in fresh]

    def left(self, *, besides: Sequence[Tensor]) -> list[str]:
        """Those that live on but for `besides` and their views: memory of a graph in others' hands."""
        gc.collect()
        known = {x.untyped_storage()._cdata for x in besides}
        alive = [x for ref in self._all if (x := ref()) is not None]
        return [f"{x.dtype} {list(x.shape)}" for x in alive if x.untyped_storage()._cdata not in known]


@contextmanager
def no_host_waits(gpu: ImaginaryGPU, *, captured: bool = False) -> Iterator[Made]:
    """Raise HostWait where something makes the host wait for the device.

    Copies between them have to be asynchronous and of pinned memory, which was there before. `captured`: what
    runs is a graph's work, in which there are no copies at all; `Made` tells what of its memory lives on.
    """

    def refuse(what: str) -> None:
        raise HostWait(f"the host waits for {what}")

    made = Made()
    gpu.waits.append(refuse)
    try:
        with _Operations(gpu, made, captured=captured), _Functions():
            yield made
    finally:
        gpu.waits.remove(refuse)


class _Operations(TorchDispatchMode):
    """Looks at operations, whoever calls them."""

    def __init__(self, gpu: ImaginaryGPU, made: Made, *, captured: bool) -> None:
        super().__init__()
        self._gpu = gpu
        self._made = made
        self._captured = captured

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        packet = func.overloadpacket
        if any(map(is_there, given)):
            if packet in _READERS:
                raise HostWait(f"{func} reads numbers of the device")
            if packet is _aten.repeat_interleave and kwargs.get("output_size") is None:
                raise HostWait("repeat_interleave without output_size reads numbers of the device")
            if packet in _INDEXED:
                _check_index(args[1])
        if (parts := decomposed(self, func, args, kwargs)) is not NotImplemented:
            return parts
        if packet in _COPIES:
            self._check_copy(func, args, kwargs)
        out = func(*args, **kwargs)
        self._made.note(out, given)
        return out

    def _check_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func.overloadpacket is _aten.copy_:
            target, source = args[:2]
            to, waits = is_there(target), not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            staged = target.dtype != source.dtype or not target.is_contiguous() or not source.is_contiguous()
            host = source if to else target
        else:
            source, device = args[0], kwargs.get("device")
            to = is_there(source) if device is None else torch.device(device).type == "cuda"
            waits, host = not kwargs.get("non_blocking"), None if is_there(source) else source
            staged = kwargs.get("dtype") not in (None, source.dtype) or not source.is_contiguous()
        if is_there(source) == to:
            return
        where = "from the host to the device" if to else "from the device to the host"
        if self._captured:
            raise HostWait(f"a graph would hold a copy {where}")
        if waits or host is None or not self._gpu.is_pinned(host):
            raise HostWait(f"a copy {where} that is not asynchronous, or not of pinned memory")
        if staged:
            raise HostWait(f"a copy {where} of other strides or types goes through memory that is not pinned")


def _check_index(tensors: Sequence[Tensor | None]) -> None:
    for index in tensors:
        if index is not None and not is_there(index):
            raise HostWait("indexing by numbers of the host copies them to the device")
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            raise HostWait("indexing by a mask reads numbers of the device")


class _Functions(TorchFunctionMode):
    """Looks at calls that make tensors of Python's numbers, and the other way around."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory") or func is Tensor.pin_memory:
            raise HostWait("pinned memory is allocated in a step")
        first = args[0] if args else None
        if func in _TO_HOST and is_there(first):
            raise HostWait(f"{func.__name__} reads numbers of the device")
        if func in _FROM_HOST:
            made_there = func is Tensor.new_tensor and is_there(first)
            device = kwargs.get("device")
            if made_there or (device is not None and torch.device(device).type == "cuda"):
                raise HostWait(f"{func.__name__} copies numbers of the host to the device")
        return func(*args, **kwargs)
