"""Repeated launches of a Triton kernel: constant arguments are bound once, varying arguments come first.

Triton's own launch inspects every argument each time, about 50 for attention, which takes several times as
long as a small kernel runs. Here, Triton inspects only the first launch of each kind; later launches pass
their arguments directly to the compiled kernel, as Triton does: tuples stay tuples.

K or V of a layer is passed as one tuple. Triton specializes every field of a tuple like a separate argument;
None and constants are not arguments of the compiled kernel. `do_not_specialize` does not apply inside tuples,
so varying numbers stay outside them. Device code can't assign a tuple that contains a dtype to a name, so it
reads `k.read.compute` where it needs it.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq.formats import Grouped, KVFormat, mean_format
from kvq.kernels.codec import hadamard_block
from kvq.kernels.gpu.rows import kind_of
from kvq.kernels.gpu.words import plain
from kvq.kernels.paged import PagedKV, PagedRows

Grid = tuple[int, int, int]
_DIVISOR = 16  # Triton compiles another kernel for addresses and numbers divisible by it
_LIMIT = 1 << 31  # and for numbers of 64 bits
_MOST_KEPT = 4096  # combinations of numbers
_OPTIONS = {"num_warps", "num_stages", "maxnreg", "enable_fp_fusion"}  # of the compiler


class Bound:  # D146: Triton's launch inspects some 50 arguments
    """A kernel whose first arguments vary; all others (weights, constants, compiler options) are bound.

    The varying arguments are tensors, whose dtypes and device never change, then integers.
    """

    def __init__(
        self, kernel: Any, tensors: Sequence[str], numbers: Sequence[str], fixed: Mapping[str, Any]
    ) -> None:
        """Bind a kernel. `kernel`: a `triton.jit` function; `tensors`, `numbers`: names of its first
        arguments; `fixed`: all other arguments by name, and compiler options."""
        names = list(kernel.arg_names)
        self._varying = [*tensors, *numbers]
        count = len(self._varying)
        assert names[:count] == self._varying, f"{names[:count]} come first, not {self._varying}"
        # Compiled kernels refuse others; interpreted ones take them silently.
        assert fixed.keys() <= {*names[count:]} | _OPTIONS, f"{kernel.__name__} takes no such arguments"
        self.fixed = fixed
        self._kernel = kernel
        self._rest = tuple(fixed.get(name) for name in names[count:])
        # Launch function, machine code, its settings and the device, by kinds of numbers and by numbers.
        self._compiled: dict[tuple[int, ...], tuple[Any, Any, Any, int]] = {}
        self._known: dict[tuple[int, ...], tuple[Any, Any, Any, int]] = {}

    def __call__(self, grid: Grid, tensors: tuple[Tensor, ...], numbers: tuple[int, ...] = ()) -> None:
        """Launch on the current stream of the tensors' device, which must be the current one."""
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
        """Launch through Triton, which inspects all arguments and may compile; return the kernel."""
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

    Use this for launches that no object keeps bound: the lookup takes the host some microseconds.
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
    """Return the kind for which Triton compiles each number: 1, a multiple of 16, any other, or refused."""
    return tuple(0 if n >= _LIMIT else 1 if n == 1 else 2 if n % _DIVISOR == 0 else 3 for n in numbers)


class Strides(NamedTuple):
    """Strides between blocks, heads, and the tokens of a block, in elements."""

    block: Any
    head: Any
    slot: Any = 0

    @classmethod
    def of(cls, rows: Tensor | None) -> "Strides":
        """Return the strides of [num_blocks, heads, slots, ...], or zeros without a tensor."""
        return cls(0, 0, 0) if rows is None else cls(*rows.stride()[:3])


class Reading(NamedTuple):
    """Constants that determine how attention reads K or V."""

    words: Any  # whether codes are read as words of two bytes
    run: Any  # bytes of a row that are read together
    width: Any  # columns of a run's words, padded
    pairs: Any  # columns of a row's minimums, padded
    paired: Any  # whether the scales of two adjacent tokens are read as one word
    compute: Any  # dtype of products
    rounded: Any = False  # whether queries are rounded to K's codes

    @classmethod
    def one_by_one(cls, compute: tl.dtype) -> "Reading":
        """Return the constants for reading codes one by one."""
        return cls(words=False, run=0, width=0, pairs=0, paired=False, compute=compute)


class Rows(NamedTuple):
    """K or V of a layer as a kernel argument. Without scales, `scales` is a pointer that is not read."""

    codes: Any
    scales: Any  # scale and minimum of a group are one word, of 16 bits if narrow: the scale in its low half
    static: Any  # None without static scales
    means: Any  # None without means of blocks
    code_strides: Strides
    scale_strides: Strides
    mean_strides: Strides
    kind: Any  # constants from here on
    bits: Any
    dim: Any
    pad: Any  # the smallest power of two not below `dim`
    group: Any
    rotated: Any  # elements of a rotated block; 1: not rotated
    mean_group: Any  # 0 without means
    cut: Any  # the part of a group's range at either end that its codes don't span
    read: Reading | None = None

    def with_codes(self, codes: Tensor) -> "Rows":
        """Return the rows with another view of the codes."""
        return self._replace(codes=codes, code_strides=Strides.of(codes))

    def with_scales(self, scales: Tensor) -> "Rows":
        """Return the rows with another view of the scales."""
        return self._replace(scales=scales, scale_strides=Strides.of(scales))

    def argument(self, *, constant_slots: bool = False) -> "Rows":
        """Return the rows as a kernel argument, with constants marked for Triton.

        `constant_slots`: whether strides between tokens are constants, too.
        """
        at, end = self._fields.index("kind"), self._fields.index("read")
        constants = {name: tl.constexpr(getattr(self, name)) for name in self._fields[at:end]}
        codes, scales, means = self.code_strides, self.scale_strides, self.mean_strides
        if constant_slots:
            codes = codes._replace(slot=tl.constexpr(codes.slot))
            scales = scales._replace(slot=tl.constexpr(scales.slot))
        means = means._replace(slot=tl.constexpr(0))
        if self.means is None:
            means = Strides(*map(tl.constexpr, means))
        read = None if self.read is None else Reading(*map(tl.constexpr, self.read))
        strides = {"code_strides": codes, "scale_strides": scales, "mean_strides": means}
        return self._replace(**strides, **constants, read=read)


def kernel_rows(part: Literal["k", "v"], kv: PagedKV) -> Rows:
    """Return K or V of a layer in the form that its blocks store; strides are in elements."""
    rows: PagedRows = getattr(kv, part)
    fmt: KVFormat = getattr(kv.formats, part)
    dim: int = getattr(kv.formats, f"{part}_head_dim")
    clip: float = getattr(kv.formats, f"{part}_clip")
    scales = rows.codes
    if rows.scales is not None:
        word = torch.int16 if fmt.is_narrow else torch.int32
        scales = rows.scales.view(word) if isinstance(fmt.scale, Grouped) else rows.scales
    mean_scale = mean_format(dim).scale
    assert isinstance(mean_scale, Grouped), "means are grouped"
    return Rows(
        codes=rows.codes,
        scales=scales,
        static=rows.static_scale,
        means=rows.means,
        code_strides=Strides.of(rows.codes),
        scale_strides=Strides.of(None if rows.scales is None else scales),
        mean_strides=Strides(*((0, 0) if rows.means is None else rows.means.stride()[:2])),
        kind=kind_of(fmt),
        bits=fmt.code.bits,
        dim=dim,
        pad=triton.next_power_of_2(dim),
        group=fmt.scale.group_size if isinstance(fmt.scale, Grouped) else dim,
        rotated=hadamard_block(dim) if fmt.rotated else 1,
        mean_group=0 if rows.means is None else mean_scale.group_size,
        cut=(1 - clip * fmt.span) / 2,
    )


def written_rows(part: Literal["k", "v"], kv: PagedKV) -> Rows:
    """Return K or V for writing, with bf16 codes as integers, since the interpreter can't cast to bf16."""
    rows = kernel_rows(part, kv)
    if rows.codes.dtype is not torch.bfloat16:
        return rows
    bits = rows.codes.view(torch.int16)
    return rows._replace(codes=bits, scales=bits if rows.scales is rows.codes else rows.scales)


def written_argument(part: Literal["k", "v"], kv: PagedKV) -> Rows:
    """Return `written_rows` as a kernel argument, cached for the lifetime of `kv`."""
    name = f"written {part}"
    if name not in kv.kept:
        kv.kept[name] = written_rows(part, kv).argument()
    kept: Rows = kv.kept[name]
    return kept


def opened(value: Any) -> Any:
    """Return a kernel argument with plain constants, as the interpreter passes separate arguments."""
    return type(value)(*map(opened, value)) if isinstance(value, tuple) else plain(value)


opened.__triton_builtin__ = True  # type: ignore[attr-defined]  # else device code may not name it
