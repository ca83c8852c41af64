"""Number of requests that fit at once, in blocks and in reserved slots."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvq.capacity.lengths import Demand
from kvq.layout import KVLayout
from kvq.sizing.needs import bytes_of, sequence_alone, sequence_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """Requests that hold KV at once, each with as much as at its end."""

    paged: int  # in blocks
    contiguous: int  # a slot of one length reserved for each, in the same format
    bytes_per_request: float  # of blocks, on average


def count_users(
    layout: KVLayout, num_blocks: Sequence[int], demand: Demand, *, step_tokens: int, most: int | None = None
) -> Users:
    """Count the requests that fit into pools, in blocks and in reserved slots.

    A prefix that all have in common is held once in blocks, where no layer slides and all tokens are kept.
    `most`: sequences that the engine runs side by side at most.
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
        each, last = (
            fmean([blocks[group] - (common and own) for blocks, own in zip(kind, shared, strict=True)])
            for kind in (held, alone)
        )
        fits.append(int((count - common - last + each) / each) if each else 0)
    slot = layout.kv_bytes_per_token * demand.slot + (
        0 if layout.states is None else layout.states.block_bytes
    )
    most = sys.maxsize if most is None else most
    return Users(
        paged=min(most, max(0, min(fits))),
        contiguous=min(most, int(bytes_of(layout, num_blocks) / slot)),
        bytes_per_request=fmean([bytes_of(layout, blocks) for blocks in held]),
    )
