"""Reference `seal`: moves blocks that have become old enough out of the staging area."""

import torch
from torch import Tensor

from kvq.formats import KVFormat
from kvq.kernels.codec import encode_block
from kvq.kernels.paged import PagedRows, StagedBatch, StagedKV


def seal(kv: StagedKV, batch: StagedBatch) -> None:
    """Quantize each block that is now full and followed by `recent` tokens; copy sink blocks unchanged.

    The new tokens' K and V must already be written to the recent blocks. The sealed bytes depend only on a
    block's own tokens, so sealing a block twice, for sequences that share it, yields the same bytes.
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
        if targets:
            _store(k, kv.sealed.k, formats.k, formats.k_clip, targets)
            _store(v, kv.sealed.v, formats.v, formats.v_clip, targets)


def _store(x: Tensor, rows: PagedRows, fmt: KVFormat, clip: float, blocks: list[int]) -> None:
    """Encode `x` [blocks, kv_heads, block_size, dim] and store it in `blocks`."""
    static = None if rows.static_scale is None else rows.static_scale[:, None, None]
    codes, scales, means = encode_block(x, fmt, static, clip=clip)
    rows.codes[blocks] = codes
    if rows.scales is not None and scales is not None:
        rows.scales[blocks, :, : scales.shape[2]] = scales  # per channel one row
    if rows.means is not None and means is not None:
        rows.means[blocks] = means
