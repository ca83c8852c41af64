"""How many requests fit at once."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvq.capacity.plan.lengths import Length
from kvq.errors import ConfigError
from kvq.layout import KVLayout
from kvq.sizing.pools import bytes_of, sequence_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """Requests that hold KV side by side, each as much as it holds at its end."""

    paged: int  # in blocks
    contiguous: int  # a slot of one length reserved for each, in the same format
    bytes_per_request: float  # of blocks, on average
    slot_bytes: int  # of one reservation


def count_users(
    layout: KVLayout,
    num_blocks: Sequence[int],
    lengths: Sequence[Length],
    *,
    slot_tokens: int,
    step_tokens: int,
    prefix_share: float = 0.0,
    seats: int | None = None,
) -> Users:
    """Requests of these lengths in pools, in blocks and in reserved slots.

    `prefix_share`: of the prompts, what all requests have in common; in blocks it is held once, where no
    layer slides. `seats`: sequences that the engine runs side by side at most.

    Raises:
        ConfigError: the share is not below 1, or a request is longer than a slot.
    """
    if not 0 <= prefix_share < 1:
        raise ConfigError(f"the prefix share must be 0 to below 1, got {prefix_share}")
    longest = max(length.total for length in lengths)
    if slot_tokens < longest:
        raise ConfigError(f"a slot of {slot_tokens} tokens does not hold a request of {longest}")
    held = [sequence_blocks(layout, x.prompt, x.output, step_tokens=step_tokens) for x in lengths]
    shared = [int(x.prompt * prefix_share) // layout.block_size for x in lengths]
    fits = []
    for group, count in enumerate(num_blocks):
        common = 0 if layout.groups[group].group.window is not None else max(shared)
        each = fmean([blocks[group] - (common and own) for blocks, own in zip(held, shared, strict=True)])
        fits.append(int((count - common) / each) if each else 0)
    slot = layout.kv_bytes_per_token * slot_tokens
    most = sys.maxsize if seats is None else seats
    return Users(
        paged=min(most, max(0, min(fits))),
        contiguous=min(most, int(bytes_of(layout, num_blocks) / slot)),
        bytes_per_request=fmean([bytes_of(layout, blocks) for blocks in held]),
        slot_bytes=round(slot),
    )
