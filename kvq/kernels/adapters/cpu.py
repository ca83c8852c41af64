"""`adapters` in C++ for CPUs, for the rows of one product and inside compiled decoder layers."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvq.errors import ConfigError
from kvq.kernels.adapters.reference import Factors, check_rows
from kvq.kernels.native.abi import DTYPES, checked_rows, rows_of, struct
from kvq.kernels.native.library import run
from kvq.kernels.native.pages import own_pages

PRODUCTS = ("qkv", "output", "gate_up", "down")  # of a decoder layer
_OUTPUTS, _RANKS = 16, 4  # to which shapes are padded
_CHOSEN, _LAYER, _ADAPTER = (struct(f"Kvq{name}") for name in ("Chosen", "LayerFactors", "Adapter"))


class CpuFactors:  # D422
    """Factors of one weight as the kernel reads them: A's rows, and B in panels of 16 outputs."""

    def __init__(self, factors: Factors, take: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        """Pack the factors. `take`: allocates memory for so many numbers; see `own_pages`.

        Raises:
            ConfigError: the dtype is not supported.
        """
        (rank, inputs), outputs = factors.a.shape, len(factors.b)
        if factors.a.dtype is not factors.b.dtype or factors.a.dtype not in DTYPES:
            raise ConfigError(f"factors must be fp32, bf16 or fp16, got {factors.a.dtype}, {factors.b.dtype}")
        ranks, more = -rank % _RANKS, -outputs % _OUTPUTS
        a = functional.pad(factors.a, (0, -inputs % _OUTPUTS, 0, ranks))
        b = functional.pad(factors.b, (0, ranks, 0, more)).view(-1, _OUTPUTS, rank + ranks)
        self._memory = (take or own_pages())(a.numel() + b.numel(), a.dtype)
        self._memory[: a.numel()] = a.flatten()
        panels = self._memory[a.numel() :]
        panels.view(len(b), rank + ranks, _OUTPUTS).copy_(b.transpose(1, 2))
        self._panels = panels.data_ptr()
        self.in_features, self.out_features, self.nbytes = inputs, outputs, self._memory.nbytes
        self.struct = self._struct()
        self.struct.rank, self.struct.code = rank + ranks, DTYPES[factors.a.dtype]
        self.struct.scale = factors.scale

    def _struct(self) -> Any:
        return struct("KvqFactors")(
            a=self._memory.data_ptr(),
            b=self._panels,
            in_features=self.in_features,
            out_features=self.out_features,
        )

    def at(self, first: int, following: Any) -> Any:
        """Return a structure for a joined product whose outputs from `first` on are this weight's."""
        copy = type(self.struct).from_buffer_copy(self.struct)
        copy.first, copy.next = first, None if following is None else addressof(following)
        return copy


class CpuAdapter:
    """Factors of an adapter for all compiled decoder layers of a model."""

    def __init__(self, layers: Sequence[Mapping[str, Sequence[tuple[int, CpuFactors]]]]) -> None:
        """`layers`: of each product in `PRODUCTS`, the weights' first outputs and factors."""
        self.struct = (_LAYER * len(layers))()
        self._kept: list[Any] = []  # structures to which others point
        for layer, products in zip(self.struct, layers, strict=True):
            for name in PRODUCTS:
                chain = None
                for first, factors in reversed(products.get(name, ())):
                    chain = factors.at(first, chain)
                    self._kept += chain, factors
                setattr(layer, name, None if chain is None else addressof(chain))


class CpuStepAdapters:
    """The adapters of a step and the choices of its rows, for compiled decoder layers."""

    def __init__(
        self, adapters: Sequence[CpuAdapter | None], chosen: Tensor, wanted: Tensor | None = None
    ) -> None:
        """`chosen`: int32 [rows], indices of `adapters` or -1. `wanted`: int64, rows whose logits are wanted;
        None if all rows pass through all layers.
        """
        self._kept = adapters, chosen, chosen if wanted is None else chosen[wanted]
        self._rows, self._wanted = len(chosen), wanted
        self._array = (_ADAPTER * len(adapters))(
            *(_ADAPTER(None if own is None else addressof(own.struct)) for own in adapters)
        )
        self.struct = struct("KvqAdapters")(
            addressof(self._array), self._kept[1].data_ptr(), self._kept[2].data_ptr()
        )

    def is_for(self, rows: int, wanted: Tensor | None) -> bool:
        """Return True if they were made for so many rows, and for these wanted ones."""
        if rows != self._rows or wanted is None or self._wanted is None:
            return rows == self._rows and wanted is self._wanted
        return torch.equal(wanted, self._wanted)


def adapters(out: Tensor, x: Tensor, factors: Sequence[CpuFactors | None], chosen: Tensor) -> None:
    """Do what the reference does, in place; see reference.py.

    A row's result is bit-identical regardless of the other rows and the number of threads.

    Raises:
        ConfigError: shapes or dtypes don't match: compiled code would write past their ends.
    """
    check_rows(out, x, chosen)
    rows, sizes = chosen.tolist(), {(f.in_features, f.out_features) for f in factors if f is not None}
    if not sizes:
        return
    least, most = min(rows, default=-1), max(rows, default=-1)
    if sizes != {(x.shape[1], out.shape[1])} or least < -1 or most >= len(factors):
        raise ConfigError(
            f"factors of {sorted(sizes)} inputs and outputs for {len(factors)} adapters don't fit rows of "
            f"{x.shape[1]} and {out.shape[1]}"
        )
    x = checked_rows(x, x.shape[1])
    own = [None if f is None else addressof(f.struct) for f in factors] + [None]  # the last for -1
    array = (_CHOSEN * len(rows))(*(_CHOSEN(own[i]) for i in rows))
    where = *rows_of(x), *rows_of(out)
    run("adapters", array, struct("KvqAround")(), *where, DTYPES[x.dtype], len(rows), torch.get_num_threads())
