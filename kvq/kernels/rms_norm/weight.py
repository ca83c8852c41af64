"""Weight of an RMS norm."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NormWeight:
    """An RMS norm: weight [dim] of fp32, bf16 or fp16, and what is added to the mean square."""

    weight: Tensor
    eps: float
