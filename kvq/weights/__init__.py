"""Quantized weights: algorithms on tensors, file formats, and modules that replace Linear layers."""

from kvq.weights.experts import PackedExperts, install_experts, packed_experts, stacked_experts
from kvq.weights.install import install
from kvq.weights.linear import (
    ROUTERS,
    Packed,
    PackedLinear,
    QuantizedLinear,
    hooks_of,
    packed_layers,
    quantized_layers,
    runs_library_code,
    weight_bytes,
    weight_count,
    weight_formats,
)
from kvq.weights.rounding import round_weight
from kvq.weights.routers import batch_invariant_routers
from kvq.weights.unstacked import (
    EXPERT_PARTS,
    UnstackedExperts,
    expert_places,
    is_expert_code,
    unstack_experts,
)

steady_routers = batch_invariant_routers  # its former name

__all__ = [
    "EXPERT_PARTS", "ROUTERS", "Packed", "PackedExperts", "PackedLinear", "QuantizedLinear",
    "UnstackedExperts", "batch_invariant_routers", "expert_places", "hooks_of", "install", "install_experts",
    "is_expert_code", "packed_experts", "packed_layers", "quantized_layers", "round_weight",
    "runs_library_code", "stacked_experts", "steady_routers", "unstack_experts", "weight_bytes",
    "weight_count", "weight_formats",
]  # fmt: skip
