"""`kvq.register_format`: a user's torch quantizer as a KV format, and the checks of its results."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError, UnfitFormat, first_lines
from kvq.formats.names import split_pair
from kvq.formats.spec import Own
from kvq.layout import MAX_BLOCK_SIZE

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,62}[a-z0-9]")
_TRIED = 5  # rows or blocks; one of them is all zeros, and one has an outlier
_MOST_BITS = 64


def register_format(
    name: str,
    quantize: Callable[[Tensor], Any],
    dequantize: Callable[..., Tensor] | None = None,
    *,
    bits: float | None = None,
    block: int | None = None,
    replace: bool = False,
) -> None:
    """Register `name` as a KV format in this process, for `kv=` and `--kv`, also in pairs and with +sinks=
    and +recent=.

    `quantize`: takes fp32 [rows, dim], rows of K or V after RoPE, and returns the dequantized rows in the
    same shape or, with `dequantize`, a tensor or tuple of tensors that `dequantize` accepts. `block`: number
    of tokens that are quantized together; the functions then take fp32 [blocks, block, dim]. Rows or blocks
    must not depend on each other. `bits`: stored bits per element, including scales; by default computed from
    the tensors that `quantize` returns.

    Torch runs the functions as tokens are written, and blocks store the dequantized rows in fp32: quality is
    measured on the code path that serves requests, but memory is computed from `bits`. `replace`: whether a
    registered name may be redefined; existing models keep their format.

    Raises:
        ConfigError: the name is already in use, `bits` is missing, or `block` is out of range. Using the name
            also raises it if the functions can't take rows, or return another shape or dtype.
    """
    _check_name(name, is_known=name in Own.registered and not replace)
    if not callable(quantize) or not (dequantize is None or callable(dequantize)):
        raise ConfigError(f"{name}: quantize and dequantize must be functions")
    if dequantize is None and bits is None:
        raise ConfigError(f"{name}: give bits=, an element's with its share of scales; nothing else tells")
    if bits is not None and not (_is_a(bits, Real) and 0 < bits <= _MOST_BITS):
        raise ConfigError(f"{name}: bits must be above 0 and up to {_MOST_BITS} an element, got {bits!r:.40}")
    if block is not None and not (_is_a(block, Integral) and 1 < block <= MAX_BLOCK_SIZE):
        raise ConfigError(f"{name}: block must be 2 to {MAX_BLOCK_SIZE} tokens, got {block!r:.40}")
    tokens = None if block is None else int(block)
    own = _Registered(name, quantize, dequantize, None if bits is None else float(bits), tokens)
    Own.registered[name] = Own(name=name, through=own.through, bits=own.bits_of, tokens=tokens)


def _is_a(given: object, kind: type[Any]) -> bool:
    return isinstance(given, kind) and not isinstance(given, bool)


def _check_name(name: str, *, is_known: bool) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith(".json"):
        raise ConfigError(
            f"a format's name is 2 to 64 of a-z, 0-9, '_', '-' and '.', a letter first; got {name!r:.80}"
        )
    if is_known:
        raise ConfigError(f"{name} is registered already; take another name, or replace=True")
    try:
        means = name == "auto" or name.startswith("kvq_") or split_pair(name)  # vLLM's begin with kvq_
    except ConfigError:
        means = None
    if means and name not in Own.registered:
        raise ConfigError(f"{name!r} means something to kvq already; take another name, such as my-{name}")


@dataclass(frozen=True, slots=True)
class _Registered:
    """Functions registered under one name, and the bits measured by trials, keyed by head dimension."""

    name: str
    quantize: Callable[[Tensor], Any]
    dequantize: Callable[..., Tensor] | None
    stated: float | None
    block: int | None
    tried: dict[int, float] = field(default_factory=dict)

    def bits_of(self, dim: int) -> float:
        """Return the bits per element, measured by a trial with rows of `dim` elements unless stated."""
        if dim not in self.tried:
            self.tried[dim] = self._try(dim)
        return self.tried[dim]

    def through(self, x: Tensor) -> Tensor:
        """Return rows, fp32 [..., dim], or blocks, [..., tokens, dim], quantized and dequantized."""
        rows = x.flatten(0, -2 if self.block is None else -3)
        return self._read_back(rows)[1].reshape(x.shape)

    def _try(self, dim: int) -> float:
        x = torch.randn(
            _TRIED, self.block or 1, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32
        )
        x[1], x[2, 0, dim // 2] = 0, 100
        x = x if self.block else x[:, 0]
        (nbytes, together), again = self._read_back(x), self.through(x)
        (one, first), *others = (self._read_back(part) for part in x.split(1))
        alone = torch.cat([first, *(made for _, made in others)])
        if again.equal(together) and not alone.allclose(together, rtol=1e-3, atol=1e-3):  # not random
            unit, or_else = ("block", "") if self.block else ("row", "; or give block=")
            raise UnfitFormat(
                f"{self.name}: what is read back of a {unit} changes with the {unit}s beside it, so with the "
                f"steps that tokens come in; quantize every {unit} by itself{or_else}"
            )
        if self.stated is not None:
            return self.stated
        # Data that all rows share, such as a codebook, does not count
        return 8 * (nbytes - one) / (x.numel() - x[:1].numel())

    def _read_back(self, x: Tensor) -> tuple[int, Tensor]:
        """Return the number of bytes in the stored tensors, and the dequantized rows."""
        try:
            stored = self.quantize(x.clone())
            is_several = self.dequantize is not None and isinstance(stored, tuple | list)
            stored = tuple(stored) if is_several else (stored,)
            nbytes: int = 0
            if self.dequantize is not None:
                nbytes = sum(part.numel() * part.element_size() for part in stored)
            made = stored[0] if self.dequantize is None else self.dequantize(*stored)
        except Exception as error:  # users' functions may raise anything
            told = f"{type(error).__name__}: {first_lines(error)}"
            raise UnfitFormat(f"{self.name} can't take rows of {x.shape[-1]} elements: {told}") from error
        wanted, got = (
            f"{y.dtype} {list(y.shape)} on {y.device}" if isinstance(y, Tensor) else f"{type(y)}"
            for y in (x, made)
        )
        if got != wanted:
            raise UnfitFormat(f"{self.name} must give back {wanted}, as it gets, got {got}")
        if not bool(made.isfinite().all()):
            raise UnfitFormat(
                f"{self.name} gave back NaN or infinity; rows may be all zeros, or have outliers"
            )
        return nbytes, made
