"""A GPU that isn't there: its tensors have shapes, dtypes and a device but no numbers; kernels don't run.

Tensors of the host stay real. So the engine's own code runs as on a GPU, where host and device mix they are
seen to mix, and all that is read back from the device is zero.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kvq.kernels import uploads
from kvq.kernels.gpu.launch import Bound
from tests.engine.imaginary_cuda import ImaginaryGPU, Launch, cuda_of, whole

_aten = torch.ops.aten


def is_there(value: Any) -> bool:
    """True for a tensor of the imaginary device."""
    return isinstance(value, FakeTensor)


@contextmanager
def imaginary_gpu(index: int = 1) -> Iterator[ImaginaryGPU]:
    """A GPU of that index; device 0 is the current one, and what is made there for another is an error."""
    gpu = ImaginaryGPU(torch.device("cuda", index))
    with ExitStack() as stack:
        for name, value in cuda_of(gpu).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        uploads.ring.cache_clear()
        stack.callback(uploads.ring.cache_clear)
        for kind in (InterpretedFunction, JITFunction):
            stack.enter_context(patch.object(kind, "run", _launcher(gpu)))
        stack.enter_context(patch.object(Bound, "__call__", _launch))  # which asks tensors for addresses
        stack.enter_context(torch.inference_mode())  # autograd's copies ask for a driver
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))  # D242
        stack.enter_context(_HostIsReal(gpu))
        stack.enter_context(_Calls(gpu))
        yield gpu


class _HostIsReal(TorchDispatchMode):
    """Operations without a tensor of the device are carried out; copies to the host bring zeros."""

    def __init__(self, gpu: ImaginaryGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (parts := decomposed(self, func, args, kwargs)) is not NotImplemented:
            return parts
        there = [is_there(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = kwargs.get("device")
        makes_there = target is not None and torch.device(target).type == "cuda"
        if makes_there:
            kwargs = {**kwargs, "device": whole(target)}
        if not makes_there and not any(there):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _aten.copy_.default and not is_there(args[0]):
            with unset_fake_temporarily():
                return args[0].zero_()
        if func is _aten._to_copy.default and target is not None and not makes_there:
            return _zeros(args[0], kwargs.get("dtype"))
        if func is _aten._local_scalar_dense.default:
            return _zeros(args[0]).item()
        return func(*args, **kwargs)


def decomposed(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation is made of, for `mode` to see; in inference mode nobody takes them apart before."""
    if func.namespace == "prim":
        return NotImplemented
    with mode:
        return func.decompose(*args, **kwargs)


# Those whose bindings ask for a driver, in operations.
_BY_HAND: dict[Any, Callable[..., Any]] = {
    Tensor.copy_: _aten.copy_,
    Tensor.contiguous: _aten.contiguous,
    Tensor.nonzero: _aten.nonzero,
    torch.nonzero: _aten.nonzero,
    Tensor.item: _aten._local_scalar_dense,
    Tensor.__int__: lambda x: int(_aten._local_scalar_dense(x)),
    Tensor.__index__: lambda x: int(_aten._local_scalar_dense(x)),
    Tensor.__float__: lambda x: float(_aten._local_scalar_dense(x)),
    Tensor.__bool__: lambda x: bool(_aten._local_scalar_dense(x)),
}


class _Calls(TorchFunctionMode):
    """What reaches no dispatcher, or not without a driver."""

    def __init__(self, gpu: ImaginaryGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            return self._gpu.pin(func(*args, **kwargs))
        if func is Tensor.pin_memory:
            return self._gpu.pin(args[0].clone())
        if func is Tensor.is_pinned:
            return self._gpu.is_pinned(args[0])
        if not args or not is_there(args[0]):
            return func(*args, **kwargs)
        if func in _BY_HAND:
            return _BY_HAND[func](*args, **kwargs)
        if func is Tensor.__getitem__:
            return _selected(*args)
        if func is Tensor.__setitem__:
            return _assign(*args)
        if func is Tensor.tolist:
            return _zeros(args[0]).tolist()
        if func is Tensor.numpy:
            raise TypeError("can't convert a tensor of a GPU to numpy; copy it to the host first")
        if func is Tensor.data_ptr:
            return 1 << 40
        return func(*args, **kwargs)


def _zeros(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    with unset_fake_temporarily():
        return torch.zeros(tuple(x.shape), dtype=dtype or x.dtype)


def _split(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """What Python's indexing does, in operations: a view, and what is left to index it with."""
    index = index if isinstance(index, tuple) else (index,)
    taken = sum(i.dim() if isinstance(i, Tensor) and i.dtype is torch.bool else i is not None for i in index)
    if ... in [i for i in index if not isinstance(i, Tensor)]:
        at = next(n for n, i in enumerate(index) if i is ...)
        index = (*index[:at], *[slice(None)] * (x.dim() - taken + 1), *index[at + 1 :])
    tensors: list[Tensor | None] = []
    dim = 0
    for i in index:
        if isinstance(i, list):
            i = torch.tensor(i)
        if i is None:
            x, dim = _aten.unsqueeze(x, dim), dim + 1
        elif isinstance(i, slice):
            x, dim = _aten.slice(x, dim, i.start, i.stop, i.step or 1), dim + 1
        elif isinstance(i, Tensor):
            tensors += [None] * (dim - len(tensors)) + [i]
            dim += max(1, i.dim()) if i.dtype is torch.bool else 1
        else:
            x = _aten.select(x, dim, i)
    return x, tensors


def _selected(x: Tensor, index: Any) -> Tensor:
    view, tensors = _split(x, index)
    return _aten.index(view, tensors) if tensors else _aten.alias(view)


def _assign(x: Tensor, index: Any, value: Any) -> None:
    view, tensors = _split(x, index)
    if tensors:
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
        _aten.index_put_(view, tensors, value.to(x.dtype))
    elif isinstance(value, Tensor):
        _aten.copy_(view, value)
    else:
        _aten.fill_(view, value)


def _launch(bound: Bound, grid: Any, tensors: tuple[Tensor, ...], numbers: tuple[int, ...] = ()) -> None:
    bound.look(grid, tensors, numbers)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Tensors among a kernel's arguments, those within tuples included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _launcher(gpu: ImaginaryGPU) -> Callable[..., None]:
    """Takes the place of a kernel's `run`."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        tensors = list(_tensors((*args, *constants.values())))
        elsewhere = {str(x.device) for x in tensors if x.device != gpu.current}
        assert not elsewhere, f"{kernel.fn.__name__} launched on {gpu.current}, given {elsewhere}"
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **constants}
        sizes = grid(named) if callable(grid) else grid
        assert all(type(n) is int for n in sizes), f"{kernel.fn.__name__} launched with a grid {sizes}"
        gpu.launches.append(Launch(kernel.fn.__name__, tuple(sizes)))

    return run
