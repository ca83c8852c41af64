"""vLLM's block pool: how a model's layers share its blocks.

A page is one layer's part of a block, as large as that layer's part of a block of kvq's own. Where all
layers have full attention, or all the same window, they are one group. Otherwise layers are sorted into
kinds, each is cut into groups of about as many layers, and all groups take their blocks from one pool: a
block is as large as the pages of the largest group, and a request takes blocks for every group. Pages are
made equally large for that, of more tokens where it comes out even, else by padding.

Source: vLLM 0.32, v1/core/kv_cache_utils.py and v1/kv_cache_interface.py; 0.33 counts the same.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from kvq.capacity.lengths import Demand
from kvq.errors import ConfigError
from kvq.layout import UNPADDED_TOKENS, KVLayout, LayerLayout

_FEW_MORE = 1.5  # times the rarest kind's layers, up to which groups are as large as the commonest kind


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerKind:
    """Properties that all layers of a group share."""

    window: int | None  # tokens; None: full attention
    block_size: int  # tokens
    head_dims: tuple[int, int] = (0, 0)  # of K and V
    page_bytes: int = 0  # without padding

    @classmethod
    def of(cls, layer: LayerLayout, block_size: int, largest: int) -> "_LayerKind":
        """Return the kind of a layer in a model with pages up to `largest` bytes."""
        times = 1 if largest % layer.nbytes else largest // layer.nbytes
        return cls(
            window=layer.geometry.window,
            block_size=times * block_size,
            head_dims=(layer.geometry.k_head_dim, layer.geometry.v_head_dim),
            page_bytes=times * layer.nbytes,
        )

    def held(self, tokens: int, in_flight: int) -> int:
        """Return the blocks of a request; a window takes one more, since it may begin inside a block."""
        if self.window is None:
            return -(-tokens // self.block_size)
        return -(-min(self.window - 1 + in_flight, tokens) // self.block_size) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmBlocks:
    """vLLM's blocks of one model in one format."""

    groups: tuple[tuple[_LayerKind, int], ...]  # with the number of layers
    block_size: int  # tokens
    block_bytes: int
    in_flight: int  # new tokens of all steps at work, whose blocks stay although windows have passed

    @classmethod
    def of(cls, layout: KVLayout, *, in_flight: int) -> "VllmBlocks":
        """Return the blocks of a layout's layers.

        Raises:
            ConfigError: a block size that pages can't have.
        """
        size = layout.block_size
        if size % UNPADDED_TOKENS:
            raise ConfigError(f"vLLM's blocks are of a multiple of {UNPADDED_TOKENS} tokens, got {size}")
        layers = [layer for group in layout.groups for layer in group.layers]
        if len(layout.groups) == 1:
            kind = _LayerKind(window=layout.groups[0].group.window, block_size=size)
            groups, block_bytes = [(kind, len(layers))], sum(layer.nbytes for layer in layers)
        else:
            largest = max(layer.nbytes for layer in layers)
            groups = group_layers(Counter(_LayerKind.of(layer, size, largest) for layer in layers))
            block_bytes = largest * max(count for _, count in groups)
        return cls(groups=tuple(groups), block_size=size, block_bytes=block_bytes, in_flight=in_flight)

    def held(self, tokens: int) -> int:
        """Return the blocks that vLLM reserves for a request of `tokens` tokens, over all groups."""
        return sum(kind.held(tokens, self.in_flight) for kind, _ in self.groups)

    def longest(self, num_blocks: int, most: int) -> int:
        """Return the longest request up to `most` tokens that vLLM starts with; it never uses one block."""
        return bisect_right(range(1, most + 1), num_blocks - 1, key=self.held)

    def users(self, num_blocks: int, demand: Demand) -> int:
        """Return how many requests fit; full-attention layers hold a shared prefix once."""
        held = [self.held(length.total) for length in demand.lengths]
        shared = [self._whole(int(x.prompt * demand.prefix_share)) for x in demand.lengths]
        common = max(shared)
        each = fmean([blocks - (common and own) for blocks, own in zip(held, shared, strict=True)])
        return max(0, int((num_blocks - 1 - common) / each))

    def _whole(self, tokens: int) -> int:
        """Return the blocks of full-attention layers that `tokens` tokens fill."""
        return sum(tokens // kind.block_size for kind, _ in self.groups if kind.window is None)

    def request_bytes(self, demand: Demand) -> float:
        """Return the mean bytes of a request's blocks."""
        return self.block_bytes * fmean([self.held(length.total) for length in demand.lengths])


def group_layers(kinds: Counter[_LayerKind]) -> list[tuple[_LayerKind, int]]:
    """Return groups with their numbers of layers; `kinds` counts the layers of each kind.

    A group is as large as the rarest kind, or as the commonest where that is hardly commoner.
    """
    size = min(kinds.values())
    if max(kinds.values()) < _FEW_MORE * size:
        size = max(kinds.values())
    groups = []
    for kind, count in kinds.items():
        num_groups = -(-count // size)
        groups += [(kind, len(range(i, count, num_groups))) for i in range(num_groups)]
    return groups
