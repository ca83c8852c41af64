"""Reference `seal`: blocks of a step's sequences that became old enough, out of the staging area."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.codec import encode_block
from kvq.kernels.paged import PagedRows, StagedBatch, StagedKV

Through = Callable[[Tensor], Tensor]  # [blocks, kv_heads, block_size, dim] -> the same shape


def seal(kv: StagedKV, batch: StagedBatch, *, through: tuple[Through, Through] | None = None) -> None:
    """Quantize blocks that are full and followed by `recent` tokens now, each whole; move sinks as they are.

    The new tokens' K and V must already be written to the recent blocks. A block's bytes depend on its own
    tokens alone, so one that is sealed twice, by sequences that share it, becomes what it was.
    `through`: what K and V of a block go through first, in fp32, in comparisons with what kvq doesn't store.
    """
    size, formats, recent, sinks = kv.sealed.block_size, kv.sealed.formats, kv.recent, kv.sinks
    for i, found in enumerate(batch.recent.sealing(kv.exact.recent, size)):
        old = found
        if sinks is not None and batch.sinks is not None:
            first = -(-kv.exact.sinks // size)
            old = range(max(found.start, first), found.stop)
            for index in range(found.start, min(found.stop, first)):
                source, target = int(batch.recent.tables[i, index]), int(batch.sinks.tables[i, index])
                sinks.k.codes[target], sinks.v.codes[target] = recent.k.codes[source], recent.v.codes[source]
        places = torch.tensor(old, dtype=torch.long, device=batch.recent.tables.device)
        sources, targets = batch.recent.tables[i, places].long(), batch.sealed.tables[i, places].tolist()
        k, v = recent.k.codes[sources], recent.v.codes[sources]
        if through is not None and targets:
            k, v = (codec(x.float()) for codec, x in zip(through, (k, v), strict=True))
        for at, target in enumerate(targets):
            _store(k[at], kv.sealed.k, formats.k, formats.k_clip, target)
            _store(v[at], kv.sealed.v, formats.v, formats.v_clip, target)


def _store(x: Tensor, rows: PagedRows, fmt: KVFormat, clip: float, block: int) -> None:
    """`x`: [kv_heads, block_size, dim]."""
    static = None if rows.static_scale is None else rows.static_scale[:, None, None]
    codes, scales, means = encode_block(x, fmt, static, clip=clip)
    rows.codes[block] = codes
    for stored, new in ((rows.scales, scales), (rows.means, means)):
        if stored is not None and new is not None:
            stored[block, :, : new.shape[1]] = new  # scales per channel are one row
