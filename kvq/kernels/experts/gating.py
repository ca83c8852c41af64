"""Gating between an expert's products."""

from dataclasses import dataclass

from kvq.kernels.gated.activation import Activation


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """activation(gates) * (rest + shift), where gates are cut to `limit` from above, the rest on both sides.

    `slope`: SiLU is x * sigmoid(slope * x).
    """

    activation: Activation = Activation.SILU
    slope: float = 1.0
    limit: float = float("inf")
    shift: float = 0.0
