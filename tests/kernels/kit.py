"""Blocks full of poison for kernel tests, and where every slot's bytes lie in them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvq.cache import KVCache
from kvq.formats import HeadMaxima, KVRecipe, StaticScales
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.kernels import PagedKV, SequenceBatch
from kvq.kernels.codec import decode, decode_means, encode, encode_block, rotate
from kvq.kernels.write_kv.reference import write_kv
from kvq.layout import BlockOrder, plan_layout

CPU = torch.device("cpu")
POISON = 0xFF  # NaN as fp32, bf16, fp16, E4M3FN and as a scale

# One of every kind, rotated and not; all fit head_dim 48, 60, 64, 80.
KINDS = (
    *("fp32", "bf16", "fp16", "fp8", "fp8_per_head", "int8", "int8_per_head"),
    *("fp32_rot", "bf16_rot", "fp8_rot", "fp8_per_head_rot", "int8_rot", "int8_per_head_rot"),
    *("int6", "int4", "int2", "k8v4", "fp8_per_head/int4", "int4/bf16"),
)

# Block means, which whole blocks are sealed with; these fit head_dim 48 and 64, the first 60, too.
MEANS = ("int4_mean", "int3_mean/int2_mean", "int8/int4_g8_mean", "int6_mean/bf16")

# Scales per channel of a block; these fit head_dim 48 and 64, the first two 60, too. The others for CPUs.
PER_CHANNEL = ("int4_per_channel/int4", "int8_per_channel/int8", "int3_per_channel/int3")
CHANNELS = (
    *PER_CHANNEL,
    *("int2_per_channel/int6_per_channel", "int4_per_channel_rot/int4_per_channel", "int6_per_channel/bf16"),
)


def recipe_of(kv: str, dims: list[tuple[int, int]]) -> KVRecipe:
    """`KVRecipe.uniform`, where gQ, as in int4_gQ_rot, stands for groups of a quarter of each row.

    No one group size is legal for rows of 48, 60 and 64 elements.
    """
    if "gQ" not in kv:
        return KVRecipe.uniform(kv, dims)
    k, v = kv.split("/")[0], kv.split("/")[-1]
    layers = [
        KVRecipe.uniform(
            f"{k.replace('gQ', f'g{k_dim // 4}')}/{v.replace('gQ', f'g{v_dim // 4}')}", [(k_dim, v_dim)]
        ).layers[0]
        for k_dim, v_dim in dims
    ]
    return KVRecipe(layers=tuple(layers), label=kv)


def static_scales(heads: list[int]) -> StaticScales:
    """Maxima of every layer and head, no two alike."""
    layers = []
    for i, count in enumerate(heads):
        parts = ("k", "v", "k_rotated", "v_rotated")
        values = {p: tuple(2.5 + i / 8 + h / 4 + n / 16 for h in range(count)) for n, p in enumerate(parts)}
        layers.append(HeadMaxima(**values))
    return StaticScales(model_digest="d", text_digest="t", tokens=1, layers=tuple(layers))


def geometry(
    dims: list[tuple[int, int]],
    *,
    kv_heads: int = 3,
    q_heads: int | None = None,
    windows: list[int | None] | None = None,
) -> ModelGeometry:
    """A model with those (K, V) head dimensions by layer."""
    windows = windows or [None] * len(dims)
    return ModelGeometry(
        model_type="test",
        layers=tuple(
            LayerGeometry(index=i, kv_heads=kv_heads, k_head_dim=k, v_head_dim=v, window=window)
            for i, ((k, v), window) in enumerate(zip(dims, windows, strict=True))
        ),
        q_heads=q_heads or kv_heads,
        hidden_size=64,
        vocab_size=64,
        max_context=4096,
    )


def poisoned_cache(
    kv: str,
    dims: list[tuple[int, int]],
    *,
    kv_heads: int = 3,
    q_heads: int | None = None,
    windows: list[int | None] | None = None,
    block_size: int = 5,
    num_blocks: int = 11,
    order: BlockOrder = BlockOrder.LAYER_MAJOR,
    fill: int = POISON,
    backend: str = "reference",
) -> KVCache:
    """A cache on the CPU whose every byte is `fill`, with static scales where the format needs them."""
    model = geometry(dims, kv_heads=kv_heads, q_heads=q_heads, windows=windows)
    recipe = recipe_of(kv, dims)
    if recipe.is_static:
        recipe = recipe.with_scales(static_scales(model.kv_heads))
    layout = plan_layout(model, recipe, block_size=block_size, order=order)
    blocks = [num_blocks] * len(layout.groups)
    cache = KVCache(layout, num_blocks=blocks, device=CPU, backend=backend)
    for group in range(len(layout.groups)):
        cache.pool(group).fill_(fill)
    return cache


def rows_like_kv(tokens: int, heads: int, dim: int, seed: int = 0) -> Tensor:
    """Random rows with an outlier channel, fp32 [tokens, heads, dim]."""
    x = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(1000 * dim + seed))
    x[..., 1] *= 4
    return x


def stored(cache: KVCache, layer: int, part: str, x: Tensor) -> Tensor:
    """The rows that a format makes of `x` [tokens, heads, dim]: decode(encode(x)), still rotated.

    Of whole blocks those of a sequence from its first block on, the last one filled up with zeros.
    """
    rows = getattr(cache.layer(layer), part)
    fmt = getattr(cache.layer(layer).formats, part)
    static = None if rows.static_scale is None else rows.static_scale[:, None]
    if not fmt.needs_whole_blocks:
        return decode(*encode(x, fmt, static), fmt, static)
    codes, scales, means = encode_block(blocks_of(x, cache.layer(layer).block_size), fmt)
    y = decode(codes, scales, fmt)
    if means is not None:
        y += decode_means(means, x.shape[-1])[..., None, :]
    return y.transpose(1, 2).flatten(0, 1)[: len(x)]


def blocks_of(x: Tensor, size: int) -> Tensor:
    """[tokens, heads, dim] -> [blocks, heads, size, dim], the last block filled up with zeros."""
    padded = functional.pad(x, (0, 0, 0, 0, 0, -len(x) % size))
    return padded.unflatten(0, (-1, size)).transpose(1, 2)


def write_sequence(kv: PagedKV, k: Tensor, v: Tensor, table: list[int]) -> None:
    """Write a sequence's rows [tokens, heads, dim] by the reference, in whole blocks where formats need them.

    The slots past a sequence's end stay what they were.
    """
    size = kv.block_size
    slots = [table[at // size] * size + at % size for at in range(len(k))]
    if not (kv.formats.k.needs_whole_blocks or kv.formats.v.needs_whole_blocks):
        write_kv(k, v, kv, torch.tensor(slots, dtype=torch.int64))
        return
    for x, rows, fmt in ((k, kv.k, kv.formats.k), (v, kv.v, kv.formats.v)):
        static = None if rows.static_scale is None else rows.static_scale[:, None, None]
        codes, scales, means = encode_block(blocks_of(x, size), fmt, static)
        for i, block in enumerate(table[: len(codes)]):
            used = min(size, len(x) - i * size)
            rows.codes[block, :, :used] = codes[i, :, :used]
            if fmt.is_per_channel:
                rows.scales[block, :, 0] = scales[i, :, 0]
            elif rows.scales is not None:
                rows.scales[block, :, :used] = scales[i, :, :used]
            if means is not None:
                rows.means[block] = means[i]


def unrotated(cache: KVCache, layer: int, part: str, x: Tensor) -> Tensor:
    """`stored`, turned back from the rotation if the format rotates."""
    y = stored(cache, layer, part, x)
    return rotate(y) if getattr(cache.layer(layer).formats, part).rotated else y


def slot_bytes(cache: KVCache, layer: int, slots: list[int], *, padding: bool = False) -> Tensor:
    """bool [pool_bytes]: True for the bytes of one layer's slots, computed from the design's order.

    With `padding`, the bytes that only align a region count with those of its block.
    """
    index = cache.group_of[layer]
    group = cache.layout.groups[index]
    block_size = group.block_size
    mask = torch.zeros(cache.pool(index).numel(), dtype=torch.bool)
    before = [x for x in group.layers if x.geometry.index < layer]
    own = next(x for x in group.layers if x.geometry.index == layer)
    for slot in slots:
        block, offset = divmod(slot, block_size)
        if group.order is BlockOrder.LAYER_MAJOR:  # [layer, block, bytes]
            start = cache.num_blocks[index] * sum(x.nbytes for x in before) + block * own.nbytes
        else:  # [block, layer, bytes]
            start = block * sum(x.nbytes for x in group.layers) + sum(x.nbytes for x in before)
        region_at = start
        for region in (own.k_codes, own.v_codes, own.k_scales, own.v_scales):
            for head in range(own.geometry.kv_heads):
                row = region_at + (head * block_size + offset) * region.row_bytes
                mask[row : row + region.row_bytes] = True
            size = own.geometry.kv_heads * block_size * region.row_bytes
            padded = (size + 15) // 16 * 16
            if padding:
                mask[region_at + size : region_at + padded] = True
            region_at += padded
    return mask


def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.empty` give NaN, and integers that are neither an index nor a length."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        x = empty(*size, **options)
        return x.fill_(
            float("nan") if x.is_floating_point() else 0x7F7F7F7F if x.dtype == torch.int32 else 127
        )

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass(frozen=True)
class Tables:
    """Scattered tables of several sequences over one pool, no block in two of them."""

    blocks: list[list[int]]
    block_size: int

    @classmethod
    def scattered(cls, lengths: list[int], block_size: int, num_blocks: int, seed: int = 0) -> "Tables":
        """Tables for sequences of those lengths, in random order."""
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        tables = []
        for length in lengths:
            need = -(-length // block_size)
            tables.append([order.pop() for _ in range(need)])
        return cls(tables, block_size)

    def slots(self, sequence: int, start: int, end: int) -> list[int]:
        """The slots of the positions [start, end) of one sequence."""
        table = self.blocks[sequence]
        return [
            table[at // self.block_size] * self.block_size + at % self.block_size for at in range(start, end)
        ]

    def batch(self, query_lens: list[int], context_lens: list[int], unused: int = -1) -> SequenceBatch:
        """The step that adds query_lens[i] tokens to end at context_lens[i]; `unused` pads the tables."""
        width = max(map(len, self.blocks)) + 1
        tables = torch.full((len(self.blocks), width), unused, dtype=torch.int32)
        for i, table in enumerate(self.blocks):
            tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
        slots: list[int] = []
        for i, (new, context) in enumerate(zip(query_lens, context_lens, strict=True)):
            slots += self.slots(i, context - new, context)
        return SequenceBatch(
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            tables=tables,
            slots=torch.tensor(slots, dtype=torch.int64),
        )
