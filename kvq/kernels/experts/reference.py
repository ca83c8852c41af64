"""Reference `experts`: the definition of correct results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.gated.reference import Activation, activate
from kvq.kernels.linear.reference import ReferenceLinear
from kvq.kernels.weight import Weight

Parts = Weight | tuple[Weight, ...]  # one weight, or several of adjacent outputs for the same inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """activation(gates) * (rest + shift), with gates clamped to at most `limit` and rest to [-limit, limit].

    `slope`: SiLU is x * sigmoid(slope * x).
    """

    activation: Activation = Activation.SILU
    slope: float = 1.0
    limit: float = float("inf")
    shift: float = 0.0


class ReferenceExperts:
    """y = sum over a row's experts e of weight_e * (down_e(gating(gate_up_e(x) + bias_e)) + bias_e).

    The sum starts with the row's first choice and is computed in fp32; each expert's inputs, intermediate
    values and outputs are rounded to x's dtype.
    """

    def __init__(
        self,
        gate_up: Sequence[Parts],
        down: Sequence[Parts],
        gating: Gating,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        """Prepare the weights of each expert: gates, then the gated rows; biases: fp32 [experts, outputs].

        Raises:
            ConfigError: the weights or biases don't match.
        """
        check_experts(gate_up, down, gate_up_bias, down_bias)
        self._gate_up, self._down = (
            [[ReferenceLinear(x) for x in parts_of(weight)] for weight in own] for own in (gate_up, down)
        )
        self._gating, self._gate_up_bias, self._down_bias = gating, gate_up_bias, down_bias
        self.hidden = parts_of(gate_up[0])[0].in_features
        self.bias_bytes = sum(bias.nbytes for bias in (gate_up_bias, down_bias) if bias is not None)
        linears = [linear for own in (*self._gate_up, *self._down) for linear in own]
        self.nbytes = sum(linear.nbytes for linear in linears) + self.bias_bytes
        self.code_bytes = sum(linear.code_bytes for linear in linears)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of experts for x [rows, hidden]; `chosen` int64, `weights` [rows, top]."""
        check_choices(x, chosen, weights, self.hidden)
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(self._down):
            raise IndexError("a row chose an expert that isn't there")
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for top in range(chosen.shape[1]):
            for expert in chosen[:, top].unique().tolist():
                rows = (chosen[:, top] == expert).nonzero()[:, 0]
                out[rows] += self._given(x[rows], expert).float() * weights[rows, top, None].float()
        return out.to(x.dtype)

    def _given(self, x: Tensor, expert: int) -> Tensor:
        """Return one expert's output for the rows `x`."""
        both = torch.cat([linear(x) for linear in self._gate_up[expert]], 1)
        if self._gate_up_bias is not None:
            both = both.float() + self._gate_up_bias[expert]
        between = gated_experts(both, self._gating).to(x.dtype)
        given = torch.cat([linear(between) for linear in self._down[expert]], 1)
        return given if self._down_bias is None else given.float() + self._down_bias[expert]


def gated_experts(both: Tensor, gating: Gating) -> Tensor:
    """Apply the gates, which come first, to the remaining values: [rows, 2 n] -> fp32 [rows, n]."""
    gates, rest = both.float().chunk(2, 1)
    gates, rest = gates.clamp(max=gating.limit), rest.clamp(-gating.limit, gating.limit)
    if gating.activation is Activation.SILU:
        return gates * torch.sigmoid(gating.slope * gates) * (rest + gating.shift)
    return activate(gates, gating.activation) * (rest + gating.shift)


def parts_of(weight: Parts) -> tuple[Weight, ...]:
    """Return the weights that make up one."""
    return weight if isinstance(weight, tuple) else (weight,)


def _shape(weight: Parts) -> tuple[int, int]:
    parts = parts_of(weight)
    if len(inputs := {part.in_features for part in parts}) != 1:
        raise ConfigError(f"only weights of the same inputs can be joined, got {sorted(inputs)} of them")
    return sum(part.out_features for part in parts), inputs.pop()


def check_experts(
    gate_up: Sequence[Parts], down: Sequence[Parts], gate_up_bias: Tensor | None, down_bias: Tensor | None
) -> None:
    """Raise ConfigError unless all experts have the same shape, as compiled code assumes."""
    shapes = {(*_shape(first), *_shape(last)) for first, last in zip(gate_up, down, strict=False)}
    both, hidden, out, inner = next(iter(shapes), (0, 0, 0, 0))
    if len(gate_up) != len(down) or len(shapes) != 1 or both != 2 * inner or hidden != out:
        raise ConfigError(
            f"experts must be as many pairs of [2 n, hidden] and [hidden, n], all of one shape; got "
            f"{len(gate_up)} and {len(down)} with shapes {sorted(shapes)}"
        )
    for bias, size in ((gate_up_bias, both), (down_bias, out)):
        if bias is not None and (bias.shape != (len(down), size) or bias.dtype is not torch.float32):
            raise ConfigError(
                f"biases of experts must be fp32 [{len(down)}, {size}], got {bias.dtype} {list(bias.shape)}"
            )


def check_choices(x: Tensor, chosen: Tensor, weights: Tensor, hidden: int) -> None:
    """Raise ConfigError unless every row has its choice of experts and their weights."""
    rows = (x.shape[0], chosen.shape[-1])
    if x.dim() != 2 or x.shape[1] != hidden or chosen.shape != rows or weights.shape != rows:
        raise ConfigError(
            f"experts take rows [rows, {hidden}], choices and weights [rows, top], got {list(x.shape)}, "
            f"{list(chosen.shape)} and {list(weights.shape)}"
        )
    if chosen.dtype is not torch.int64:
        raise ConfigError(f"choices of experts must be int64, got {chosen.dtype}")
