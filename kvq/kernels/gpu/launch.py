"""Launching a Triton kernel again and again: what stays is bound once, what changes is put in its place.

Triton's own launch looks at every argument every time, some 40 of attention's, which takes several times as
long as a small kernel runs. Here it looks at the first launch of a kind; later ones hand their arguments to
what was compiled for that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs

Grid = tuple[int, int, int]
_DIVISOR = 16  # Triton compiles another kernel for addresses and numbers that it divides
_MOST = 1 << 31  # and for numbers of 64 bits


class Bound:
    """A kernel with most arguments bound: constants, weights, strides, options of the compiler.

    What varies are tensors, each of one dtype and on one device for ever, and whole numbers.
    """

    def __init__(
        self,
        kernel: Any,
        tensors: Sequence[str],
        numbers: Sequence[str] = (),
        **fixed: Any,
    ) -> None:
        """`kernel`: a function of `triton.jit`; `tensors`, `numbers`: what varies, in the order of calls."""
        self.fixed = fixed
        self._kernel = kernel
        self._varying = (*tensors, *numbers)
        names = kernel.arg_names
        self._template = [fixed.get(name) for name in names]
        self._tensors = [names.index(name) for name in tensors]
        self._numbers = [names.index(name) for name in numbers]
        # What launches, the machine code, its settings, and the device.
        self._compiled: dict[int, tuple[Any, Any, Any, int]] = {}

    def __call__(self, grid: Grid, tensors: tuple[Tensor, ...], numbers: tuple[int, ...] = ()) -> None:
        """Launch on the current stream of the kernel's device, which is to be the current one."""
        arguments, addresses, kind = self._template.copy(), 0, 0
        for place, tensor in zip(self._tensors, tensors, strict=True):
            arguments[place] = tensor
            addresses |= tensor.data_ptr()
        for place, number in zip(self._numbers, numbers, strict=True):
            arguments[place] = number
            kind = 4 * kind + (1 if number == 1 else 2 if number % _DIVISOR == 0 else 3)
        found = self._compiled.get(kind)
        if found is None or addresses % _DIVISOR or knobs.runtime.launch_enter_hook.calls:
            self._look(grid, (*tensors, *numbers), None if addresses % _DIVISOR else kind)
            return
        run, function, metadata, device = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*grid, stream, function, metadata, None, None, None, *arguments)

    def _look(self, grid: Grid, values: tuple[Tensor | int, ...], kind: int | None) -> None:
        """Let Triton look at all arguments, and compile where it must; keep what it compiled for a kind."""
        assert all(isinstance(value, Tensor) or value < _MOST for value in values), "numbers have 32 bits"
        compiled = self._kernel[grid](**dict(zip(self._varying, values, strict=True)), **self.fixed)
        where = next(value.device.index for value in values if isinstance(value, Tensor))
        if kind is not None and where is not None:  # the interpreter's CPU has no index
            self._compiled[kind] = compiled.run, compiled.function, compiled.packed_metadata, where
