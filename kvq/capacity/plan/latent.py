"""Multi-head latent attention: what its KV takes in engines that keep the latent vectors.

kvq's engine stores K and V per head. Engines that keep the vectors which both are computed from need one
of `kv_lora_rank` + `qk_rope_head_dim` values for each token and layer, on every tensor-parallel rank.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvq.capacity.plan.lengths import Demand
from kvq.geometry import ModelGeometry
from kvq.layout import KVLayout

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # formats that others keep latent vectors in


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentKV:
    """The latent form in the same pool."""

    bytes_per_token: int  # on one GPU
    users: int


def latent_values(config: Mapping[str, Any], geometry: ModelGeometry) -> int | None:
    """Of a token and layer; None of models without latent vectors."""
    rank, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    is_latent = geometry.layers[0].k_head_dim != geometry.layers[0].v_head_dim
    if not is_latent or type(rank) is not int or type(rope) is not int:
        return None
    return rank + rope


def latent_kv(
    values: int | None, layout: KVLayout, kv: str, pool_bytes: int, demand: Demand
) -> LatentKV | None:
    """How many requests the pool would hold; None for formats that nobody keeps them in."""
    if values is None or kv not in _BYTES:
        return None
    size = layout.block_size
    each = values * sum(len(group.layers) for group in layout.groups) * _BYTES[kv]
    held = fmean([-(-length.total // size) * size * each for length in demand.lengths])
    return LatentKV(bytes_per_token=each, users=int(pool_bytes / held))
