"""`kvq.register_format`: a quantizer of one's own among the formats, in torch, and what it has to give."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError, UnfitFormat, first_lines
from kvq.formats.names import split_pair
from kvq.formats.own import Own
from kvq.layout import MAX_BLOCK_SIZE

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,62}[a-z0-9]")
_TRIED = 5  # rows or blocks, of which one is zeros and one has an element that is loud
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
    """Make `name` a KV format: for `kv=` and `--kv` of this process, in pairs, with +sinks= and +recent=.

    `quantize`: takes fp32 [rows, dim], rows of K or V after RoPE, and returns what is read back, the same
    shape; or, with `dequantize`, a tensor or a tuple of tensors, which `dequantize` takes. `block`: tokens
    that are quantized together; then fp32 [some, block, dim]. Neither may make one row, or one block, depend
    on others. `bits`: stored for an element, scales included; by default what the tensors in between take.

    Torch runs it as tokens are written, and blocks hold what is read back, in fp32: figures of quality are
    those of the path that serves, those of memory are what `bits` says. `replace`: change a name that is
    registered already; models made before keep what they have.

    Raises:
        ConfigError: a name that means something, bits that nothing says, or a size of blocks out of range.
            Whoever uses the name gets one for rows that the functions can't take, or give back as others.
    """
    _check_name(name, replace=replace)
    if dequantize is None and bits is None:
        raise ConfigError(f"{name}: give bits=, an element's with its share of scales; nothing else tells")
    if bits is not None and not (type(bits) in (int, float) and 0 < bits <= _MOST_BITS):
        raise ConfigError(f"{name}: bits must be above 0 and up to {_MOST_BITS} an element, got {bits!r:.40}")
    if block is not None and not (type(block) is int and 1 < block <= MAX_BLOCK_SIZE):
        raise ConfigError(f"{name}: block must be 2 to {MAX_BLOCK_SIZE} tokens, got {block!r:.40}")
    own = _Registered(name, quantize, dequantize, bits, block)
    Own.registered[name] = Own(name=name, through=own.through, bits=own.bits_of, tokens=block)


def _check_name(name: str, *, replace: bool) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith(".json"):
        raise ConfigError(
            f"a format's name is 2 to 64 of a-z, 0-9, '_', '-' and '.', a letter first; got {name!r:.80}"
        )
    if name in Own.registered:
        if not replace:
            raise ConfigError(f"{name} is registered already; take another name, or replace=True")
        return
    try:
        split_pair(name)
    except ConfigError:
        if name != "auto" and not name.startswith("kvq_"):  # which vLLM's names begin with
            return
    raise ConfigError(f"{name!r} means something to kvq already; take another name, such as my-{name}")


@dataclass(frozen=True, slots=True)
class _Registered:
    """The functions behind a name, and the bits that trials of them have shown, by head dimension."""

    name: str
    quantize: Callable[[Tensor], Any]
    dequantize: Callable[..., Tensor] | None
    stated: float | None
    block: int | None
    tried: dict[int, float] = field(default_factory=dict)

    def bits_of(self, dim: int) -> float:
        """Bits of an element, after a trial for rows of `dim` elements.

        Raises:
            UnfitFormat: the functions fail there, or give back what is none of those rows.
        """
        if dim not in self.tried:
            try:
                self.tried[dim] = self._try(dim)
            except ConfigError:
                raise
            except Exception as error:  # whatever functions of others raise
                told = f"{type(error).__name__}: {first_lines(error)}"
                raise UnfitFormat(f"{self.name} can't take rows of {dim} elements: {told}") from error
        return self.tried[dim]

    def through(self, x: Tensor) -> Tensor:
        """What is read back of rows, fp32 [..., dim], or of whole blocks [..., tokens, dim].

        Raises:
            ConfigError: another shape or dtype, or NaN or infinity.
        """
        rows = x.flatten(0, -2 if self.block is None else -3)
        return self._made(rows)[0].view(x.shape)

    def _try(self, dim: int) -> float:
        x = torch.randn(_TRIED, self.block or 1, dim, generator=torch.Generator().manual_seed(0))
        x[1], x[2, 0, dim // 2] = 0, 100
        x = x if self.block else x[:, 0]
        made, bits = self._made(x)
        alone = torch.cat([self._made(part)[0] for part in x.split(1)])
        if self._made(x)[0].equal(made) and not alone.allclose(made, rtol=1e-3, atol=1e-3):
            unit = "block" if self.block else "row"
            advice = "" if self.block else "; or give block=, the tokens that are quantized together"
            raise UnfitFormat(
                f"{self.name}: what is read back of a {unit} changes with the {unit}s beside it, so with the "
                f"steps that tokens come in; quantize every {unit} by itself{advice}"
            )
        return bits

    def _made(self, x: Tensor) -> tuple[Tensor, float]:
        """What is read back, and the bits of an element."""
        made, bits = self.quantize(x.clone()), self.stated
        if self.dequantize is not None:
            stored = made if isinstance(made, tuple | list) else (made,)
            if bits is None:
                bits = 8 * sum(part.numel() * part.element_size() for part in stored) / max(1, x.numel())
            made = self.dequantize(*stored)
        if not isinstance(made, Tensor) or (made.shape, made.dtype, made.device) != (
            x.shape,
            x.dtype,
            x.device,
        ):
            got = (
                f"{made.dtype} {list(made.shape)} on {made.device}"
                if isinstance(made, Tensor)
                else type(made)
            )
            raise UnfitFormat(
                f"{self.name} must give back {x.dtype} {list(x.shape)} on {x.device}, as it gets, got {got}"
            )
        if not bool(made.isfinite().all()):
            raise UnfitFormat(
                f"{self.name} gave back NaN or infinity; a row may be all zeros, or have outliers"
            )
        assert bits is not None, "stated, or counted"
        return made, bits
