"""How many requests fit at once: in blocks, in reserved slots, and as latent vectors.

Engines for multi-head latent attention keep the vectors which K and V are computed from, `kv_lora_rank` +
`qk_rope_head_dim` values for each token and layer, on every tensor-parallel rank; here they stand beside a
model's K and V where those are stored per head. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvq.capacity.lengths import Demand
from kvq.geometry import ModelGeometry
from kvq.layout import KVLayout
from kvq.sizing.needs import bytes_of, sequence_alone, sequence_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """Requests that hold KV side by side, each as much as it holds at its end."""

    paged: int  # in blocks
    contiguous: int  # a slot of one length reserved for each, in the same format
    bytes_per_request: float  # of blocks, on average


def count_users(
    layout: KVLayout,
    num_blocks: Sequence[int],
    demand: Demand,
    *,
    step_tokens: int,
    seats: int | None = None,
) -> Users:
    """Requests in pools, in blocks and in reserved slots.

    A prefix that all have in common is held once in blocks, where no layer slides and all tokens are kept.
    `seats`: sequences that the engine runs side by side at most.
    """
    lengths = demand.lengths
    held, alone = (
        [blocks_of(layout, x.prompt, x.output, step_tokens=step_tokens) for x in lengths]
        for blocks_of in (sequence_blocks, sequence_alone)
    )
    shared = [int(x.prompt * demand.prefix_share) // layout.block_size for x in lengths]
    fits = []
    for group, (count, layer) in enumerate(zip(num_blocks, layout.groups, strict=True)):
        common = 0 if layer.group.window is not None or layer.limit is not None else max(shared)
        each, most = (
            fmean([blocks[group] - (common and own) for blocks, own in zip(kind, shared, strict=True)])
            for kind in (held, alone)
        )
        fits.append(int((count - common - most + each) / each) if each else 0)
    slot = layout.kv_bytes_per_token * demand.slot + (
        0 if layout.states is None else layout.states.block_bytes
    )
    most = sys.maxsize if seats is None else seats
    return Users(
        paged=min(most, max(0, min(fits))),
        contiguous=min(most, int(bytes_of(layout, num_blocks) / slot)),
        bytes_per_request=fmean([bytes_of(layout, blocks) for blocks in held]),
    )


_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # formats that others keep latent vectors in


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentKV:
    """The latent form in the same pool."""

    bytes_per_token: int  # on one GPU
    users: int


def latent_values(config: Mapping[str, Any], geometry: ModelGeometry) -> int | None:
    """Of a token and layer; None of models without latent vectors, and of those that are kept here too."""
    if any(layer.is_latent for layer in geometry.layers):
        return None
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
