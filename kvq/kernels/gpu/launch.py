"""Repeated launches of a Triton kernel: arguments that stay are bound once, those that change come first.

Triton's own launch looks at every argument every time, some 50 of attention's, which takes several times as
long as a small kernel runs. Here it looks at the first launch of a kind; later ones hand their arguments to
the kernel compiled for it, as Triton does: tuples stay tuples.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import knobs

Grid = tuple[int, int, int]
_DIVISOR = 16  # Triton compiles another kernel for addresses and numbers that it divides
_LIMIT = 1 << 31  # and for numbers of 64 bits
_MOST_KEPT = 4096  # combinations of numbers
_OPTIONS = {"num_warps", "num_stages", "maxnreg", "enable_fp_fusion"}  # of the compiler


class Bound:  # D146: Triton's launch looks at some 50 arguments
    """A kernel whose first arguments vary, with all others bound: weights, constants, compiler options.

    What varies are tensors, each of one dtype and on one device for ever, then whole numbers.
    """

    def __init__(
        self, kernel: Any, tensors: Sequence[str], numbers: Sequence[str], fixed: Mapping[str, Any]
    ) -> None:
        """`kernel`: a function of `triton.jit`; `tensors`, `numbers`: its first arguments; `fixed`: its
        others, by their names, and the compiler's options."""
        names = list(kernel.arg_names)
        self._varying = [*tensors, *numbers]
        count = len(self._varying)
        assert names[:count] == self._varying, f"{names[:count]} come first, not {self._varying}"
        # Compiled kernels refuse others; interpreted ones take them silently.
        assert fixed.keys() <= {*names[count:]} | _OPTIONS, f"{kernel.__name__} takes no such arguments"
        self.fixed = fixed
        self._kernel = kernel
        self._rest = tuple(fixed.get(name) for name in names[count:])
        # What launches, the machine code, its settings, and the device; by kinds of numbers, and by numbers.
        self._compiled: dict[tuple[int, ...], tuple[Any, Any, Any, int]] = {}
        self._known: dict[tuple[int, ...], tuple[Any, Any, Any, int]] = {}

    def __call__(self, grid: Grid, tensors: tuple[Tensor, ...], numbers: tuple[int, ...] = ()) -> None:
        """Launch on the current stream of the tensors' device, which is to be the current one."""
        found = self._known.get(numbers) or self._of_kind(numbers)
        unaligned = reduce(or_, map(Tensor.data_ptr, tensors)) % _DIVISOR
        if found is None or unaligned or knobs.runtime.launch_enter_hook.calls:
            compiled = self.look(grid, tensors, numbers)
            device = tensors[0].device.index
            if not unaligned and device is not None:  # the interpreter's CPU has no index
                kept = compiled.run, compiled.function, compiled.packed_metadata, device
                self._compiled[_kinds(numbers)] = kept
            return
        run, function, metadata, device = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*grid, stream, function, metadata, None, None, None, *tensors, *numbers, *self._rest)

    def look(self, grid: Grid, tensors: tuple[Tensor, ...], numbers: tuple[int, ...]) -> Any:
        """Launch, and let Triton look at all arguments and compile where it must; what it compiled."""
        assert all(number < _LIMIT for number in numbers), "numbers have 32 bits"
        named = dict(zip(self._varying, (*tensors, *numbers), strict=True))
        return self._kernel[grid](**named, **self.fixed)

    def _of_kind(self, numbers: tuple[int, ...]) -> tuple[Any, Any, Any, int] | None:
        found = self._compiled.get(_kinds(numbers))
        if found is not None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[numbers] = found
        return found


def launch(
    kernel: Any,
    grid: Grid,
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: Mapping[str, Hashable],
) -> None:
    """Launch a kernel whose arguments are these tensors, then these numbers, then constants.

    For what no object keeps bound: it costs the host some microseconds to find that again.
    """
    dtypes = tuple(tensor.dtype for tensor in tensors)
    bound = _bound(kernel, tensors[0].device, dtypes, len(numbers), tuple(constants.items()))
    bound(grid, tensors, numbers)


@lru_cache(maxsize=512)
def _bound(
    kernel: Any,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    numbers: int,
    constants: tuple[tuple[str, Hashable], ...],
) -> Bound:
    names, count = kernel.arg_names, len(dtypes)
    return Bound(kernel, names[:count], names[count : count + numbers], dict(constants))


def _kinds(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return what Triton would compile for: 1, what 16 divides, others, and what is refused."""
    return tuple(0 if n >= _LIMIT else 1 if n == 1 else 2 if n % _DIVISOR == 0 else 3 for n in numbers)
