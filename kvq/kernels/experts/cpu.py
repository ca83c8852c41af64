"""`experts` in C++ for CPUs."""

from collections.abc import Sequence
from ctypes import addressof

import torch
from torch import Tensor

from kvq.kernels.experts.reference import Gating, Parts, check_choices, check_experts, parts_of
from kvq.kernels.gated.reference import check_activation
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.abi import DTYPES, checked_rows, rows_of, struct
from kvq.kernels.native.library import run


class CpuExperts:
    """Routed experts as in the reference, bit-identical to using `CpuLinear` for every expert.

    A row's result is bit-identical regardless of the other rows, their experts, and the number of threads.
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
        """See the reference.

        Raises:
            ConfigError: the weights or biases don't match, or the activation has no C++ kernel.
        """
        check_activation(gating.activation)
        check_experts(gate_up, down, gate_up_bias, down_bias)
        self._linears = [[CpuLinear(*parts_of(weight)) for weight in own] for own in (gate_up, down)]
        arrays = [(struct("KvqLinear") * len(own))(*(x.struct for x in own)) for own in self._linears]
        biases = [None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]
        self._kept = arrays, biases  # the structure points to their memory
        self._struct = struct("KvqExperts")(
            *(addressof(array) for array in arrays),
            *(None if bias is None else bias.data_ptr() for bias in biases),
            experts=len(down),
            activation=gating.activation,
            slope=gating.slope,
            limit=gating.limit,
            shift=gating.shift,
        )
        self.hidden = self._linears[0][0].in_features
        self.bias_bytes = sum(bias.nbytes for bias in biases if bias is not None)
        self.nbytes = sum(linear.nbytes for own in self._linears for linear in own) + self.bias_bytes
        self.code_bytes = sum(linear.code_bytes for own in self._linears for linear in own)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of experts for x [rows, hidden]; `chosen` int64, `weights` [rows, top]."""
        check_choices(x, chosen, weights, self.hidden)
        x, chosen, weights = checked_rows(x, self.hidden), chosen.contiguous(), weights.float().contiguous()
        out = torch.empty(x.shape[0], self.hidden, dtype=x.dtype)
        picked = chosen.data_ptr(), weights.data_ptr(), chosen.shape[1]
        sizes = DTYPES[x.dtype], len(x), torch.get_num_threads()
        run("experts", self._struct, *rows_of(x), *picked, *rows_of(out), *sizes)
        return out
