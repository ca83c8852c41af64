"""Reference `adapters`: the definition of correct results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Factors:
    """Low-rank update of one weight: y += scale * (x A^T) B^T.

    `a`: [rank, in]; `b`: [out, rank]; both of one dtype: fp32, bf16 or fp16.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.a.nbytes + self.b.nbytes

    def to(self, device: torch.device) -> "Factors":
        """Return the factors on another device."""
        return Factors(a=self.a.to(device), b=self.b.to(device), scale=self.scale)

    def narrowest(self) -> "Factors":
        """Return the factors in 16 bits if that is exact; files in fp32 often hold 16-bit numbers."""
        for dtype in (torch.bfloat16, torch.float16):
            a, b = self.a.to(dtype), self.b.to(dtype)
            if torch.equal(a.float(), self.a.float()) and torch.equal(b.float(), self.b.float()):
                return Factors(a=a.contiguous(), b=b.contiguous(), scale=self.scale)
        return Factors(a=self.a.float().contiguous(), b=self.b.float().contiguous(), scale=self.scale)


def check_rows(out: Tensor, x: Tensor, chosen: Tensor) -> None:
    """Raise ConfigError unless `out` and `x` are rows of one dtype, and `chosen` has an int32 for each."""
    are_rows = out.dim() == x.dim() == 2 and out.dtype is x.dtype and chosen.dtype is torch.int32
    if not are_rows or not len(out) == len(x) == len(chosen):
        raise ConfigError(
            f"adapters take rows of one dtype and an int32 for each, got {list(out.shape)} {out.dtype}, "
            f"{list(x.shape)} {x.dtype} and {list(chosen.shape)} {chosen.dtype}"
        )


def adapters(out: Tensor, x: Tensor, factors: Sequence[Factors | None], chosen: Tensor) -> None:
    """Add to each row of `out`, in place, the update of row `x` by the factors that it has chosen.

    out[r] += scale * (x[r] A^T) B^T, in fp32, rounded once to the dtype of `out`. `out`: [rows, out];
    `x`: [rows, in]; `chosen`: int32 [rows], indices of `factors`. Rows with -1, or whose adapter is None
    because it leaves this weight as it is, stay unchanged.
    """
    check_rows(out, x, chosen)
    for i, own in enumerate(factors):
        rows = (chosen == i).nonzero()[:, 0]
        if own is not None and len(rows):
            update = own.scale * (x[rows].float() @ own.a.float().T) @ own.b.float().T
            out[rows] = (out[rows].float() + update).to(out.dtype)
