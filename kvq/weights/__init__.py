"""Weights: algorithms on tensors, on-disk packing, and what takes a Linear layer's place."""

from kvq.weights.install import install
from kvq.weights.linear import (
    ROUTERS,
    PackedLinear,
    QuantizedLinear,
    hooks_of,
    packed_layers,
    quantized_layers,
    weight_bytes,
    weight_count,
)
from kvq.weights.rounding import round_weight

__all__ = [
    "ROUTERS",
    "PackedLinear",
    "QuantizedLinear",
    "hooks_of",
    "install",
    "packed_layers",
    "quantized_layers",
    "round_weight",
    "weight_bytes",
    "weight_count",
]
