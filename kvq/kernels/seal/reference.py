"""Reference `seal`: blocks of a step's sequences that became old enough, out of the staging area."""

from collections.abc import Callable

from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.codec import encode_block
from kvq.kernels.paged import PagedRows, StagedBatch, StagedKV

Through = Callable[[Tensor], Tensor]  # [kv_heads, block_size, dim] -> the same shape


def seal(kv: StagedKV, batch: StagedBatch, *, through: tuple[Through, Through] | None = None) -> None:
    """Quantize blocks that are full and followed by `recent` tokens now, each whole; move sinks as they are.

    The new tokens' K and V must already be written to the recent blocks. A block's bytes depend on its own
    tokens alone, so one that is sealed twice, by sequences that share it, becomes what it was.
    `through`: what K and V of a block go through first, in fp32, in comparisons with what kvq doesn't store.
    """
    size, formats = kv.sealed.block_size, kv.sealed.formats
    recent, sinks = kv.recent, kv.sinks
    for i, found in enumerate(batch.recent.sealing(kv.exact.recent, size)):
        for index in found:
            source = int(batch.recent.tables[i, index])
            if sinks is not None and index * size < kv.exact.sinks:
                assert batch.sinks is not None, "a layer with sinks has their tables"
                target = int(batch.sinks.tables[i, index])
                sinks.k.codes[target], sinks.v.codes[target] = recent.k.codes[source], recent.v.codes[source]
                continue
            target = int(batch.sealed.tables[i, index])
            k, v = recent.k.codes[source], recent.v.codes[source]
            if through is not None:
                k, v = (codec(x.float()) for codec, x in zip(through, (k, v), strict=True))
            _store(k, kv.sealed.k, formats.k, formats.k_clip, target)
            _store(v, kv.sealed.v, formats.v, formats.v_clip, target)


def _store(x: Tensor, rows: PagedRows, fmt: KVFormat, clip: float, block: int) -> None:
    """`x`: [kv_heads, block_size, dim]."""
    static = None if rows.static_scale is None else rows.static_scale[:, None, None]
    codes, scales, means = encode_block(x, fmt, static, clip=clip)
    rows.codes[block] = codes
    for stored, new in ((rows.scales, scales), (rows.means, means)):
        if stored is not None and new is not None:
            stored[block] = new
