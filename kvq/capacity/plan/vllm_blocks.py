"""How a model's layers share vLLM's blocks.

A page is one layer's part of a block, as large as that layer's part of a block of kvq's own. Layers of one
kind, with full attention or with one window, are a group; where a model has several kinds, each is cut into
groups of about as many layers. All groups take their blocks from one pool: a block is as large as the pages
of the largest group, and a request takes blocks for every group.

Source: vLLM 0.32, v1/core/kv_cache_utils.py and v1/kv_cache_interface.py; 0.33 counts the same.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from kvq.capacity.lengths import Demand
from kvq.errors import ConfigError
from kvq.layout import UNPADDED_TOKENS, KVLayout

_FEW_MORE = 1.5  # times the rarest kind's layers, up to which groups are as large as the commonest kind


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table."""

    window: int | None  # tokens; None: full attention
    num_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmBlocks:
    """The blocks of one model in one format."""

    groups: tuple[Group, ...]
    block_size: int  # tokens
    block_bytes: int
    in_flight: int  # new tokens of all steps at work, whose blocks stay although windows have passed

    @classmethod
    def of(cls, layout: KVLayout, *, in_flight: int) -> "VllmBlocks":
        """Those of a layout's layers.

        Raises:
            ConfigError: a block size that pages can't have, or windows beside pages of several sizes.
        """
        if layout.block_size % UNPADDED_TOKENS:
            raise ConfigError(
                f"vLLM's blocks are of a multiple of {UNPADDED_TOKENS} tokens, got {layout.block_size}"
            )
        groups = group_layers({x.group.window: len(x.layers) for x in layout.groups})
        pages = [layer.nbytes for group in layout.groups for layer in group.layers]
        if len(groups) > 1 and len(set(pages)) > 1:
            raise ConfigError(
                "vLLM shares blocks among full and sliding layers only where their pages are equally large; "
                "take one format for all layers"
            )
        size = sum(pages) if len(groups) == 1 else pages[0] * max(group.num_layers for group in groups)
        return cls(groups=groups, block_size=layout.block_size, block_bytes=size, in_flight=in_flight)

    def held(self, tokens: int) -> int:
        """What vLLM reserves for a request of so many tokens, in all groups together.

        Of windows a block more than they are long, since they begin anywhere in one.
        """
        blocks = 0
        for group in self.groups:
            if group.window is None:
                blocks += -(-tokens // self.block_size)
            else:
                kept = min(group.window - 1 + self.in_flight, tokens)
                blocks += -(-kept // self.block_size) + 1
        return blocks

    def longest(self, num_blocks: int, most: int) -> int:
        """The longest request up to `most` tokens that vLLM starts with: one block is never given out."""
        return bisect_right(range(1, most + 1), num_blocks - 1, key=self.held)

    def users(self, num_blocks: int, demand: Demand) -> int:
        """Requests side by side; a prefix that all have in common is held once, in full layers."""
        full = sum(group.window is None for group in self.groups)
        held = [self.held(length.total) for length in demand.lengths]
        shared = [full * (int(x.prompt * demand.prefix_share) // self.block_size) for x in demand.lengths]
        common = max(shared)
        each = fmean([blocks - (common and own) for blocks, own in zip(held, shared, strict=True)])
        return max(0, int((num_blocks - 1 - common) / each))

    def request_bytes(self, demand: Demand) -> float:
        """Of a request's blocks, on average."""
        return self.block_bytes * fmean([self.held(length.total) for length in demand.lengths])


def group_layers(kinds: Mapping[int | None, int]) -> tuple[Group, ...]:
    """Groups of layers; `kinds`: how many have which window.

    A group is as large as the rarest kind, or as the commonest where that is hardly commoner.
    """
    size = min(kinds.values())
    if max(kinds.values()) < _FEW_MORE * size:
        size = max(kinds.values())
    groups = []
    for window, count in kinds.items():
        num_groups = -(-count // size)
        groups += [Group(window, len(range(i, count, num_groups))) for i in range(num_groups)]
    return tuple(groups)
