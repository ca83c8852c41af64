"""Reference `copy_blocks`: complete blocks are copied within one layer group's pool, one after another."""

from collections.abc import Sequence

from torch import Tensor

from kvq.kernels.uploads import upload


def copy_blocks(parts: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks as if one pair at a time: a block written for one pair may be read for the next.

    `parts`: uint8 [num_blocks, run bytes], one for each run of bytes in a block: one per layer in layer-major
    pools, a single one in block-major pools. `pairs`: (source, target) block ids, with repeats and chains
    allowed. Codes, scales and padding are copied alike, so formats don't matter here, and a kernel's
    `supports` depends only on the device.
    """
    if parts[0].device.type != "cpu":
        copy_together(parts, pairs)
        return
    for part in parts:
        for source, target in pairs:
            part[target] = part[source]


def copy_together(parts: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks with two launches per part for any number of pairs; on CPUs, this is ten times slower."""
    origin = final_sources(pairs)
    if not origin:
        return
    targets, sources = upload([list(origin), list(origin.values())], parts[0].device)
    for part in parts:
        part[targets] = part[sources]  # all are gathered before the first is overwritten


def final_sources(pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Map each block that changes to the block whose original bytes it finally contains.

    [(0, 1), (1, 2)] yields {1: 0, 2: 0}; [(1, 2), (0, 1)] yields {2: 1, 1: 0}.
    """
    origin: dict[int, int] = {}
    for source, target in pairs:
        origin[target] = origin.get(source, source)
    return {target: source for target, source in origin.items() if target != source}
