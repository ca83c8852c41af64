"""Quantized weights: algorithms on tensors, on-disk packing, and what takes a Linear layer's place."""

from kvq.weights.linear import QuantizedLinear, replace_linear
from kvq.weights.rounding import round_weight

__all__ = ["QuantizedLinear", "replace_linear", "round_weight"]
