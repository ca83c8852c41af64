"""Digest of the stored K and V of a sequence."""

import torch
import xxhash
from torch import Tensor

from kvq.blockmgr import Sequence
from kvq.cache.backend import CacheBackend
from kvq.kernels.attend.options import AttentionOptions, parts_of
from kvq.layout import GroupLayout, KVLayout, Role


def kv_digest(cache: CacheBackend, layout: KVLayout, sequence: Sequence, length: int) -> str:
    """Return the xxh3-128 digest, in hex, of the K and V of a sequence's first `length` tokens, as stored.

    Included are the blocks that the next token can see; tokens that are stored in two forms are included in
    the form that the last token reads. Slots of later tokens are left out.
    """
    size, last, hasher = layout.block_size, length - 1, xxhash.xxh3_128()
    roles = (Role.SEALED, Role.RECENT, Role.SINKS)
    parts = dict(zip(roles, parts_of(layout.exact, size), strict=True)) if layout.is_staged else {}
    for number, group in enumerate(layout.attended):
        if layout.written_from(number) is None:
            continue
        geometry = group.layers[0].geometry
        options = AttentionOptions(scale=1.0).reaching(geometry.window, is_chunked=geometry.is_chunked)
        first, end = options.oldest(length), length
        if (part := parts.get(group.role)) is not None:
            first, end = max(first, part.oldest(last)), part.end(last)
        for index in range(first // size, -(-end // size)):
            content = cache.read_block(number, sequence.tables[number][index])
            rows = min(size, end - index * size)
            hasher.update((content if rows == size else _first_rows(group, content, rows)).numpy().data)
    return hasher.hexdigest()


def _first_rows(layout: GroupLayout, content: Tensor, rows: int) -> Tensor:
    """Return the bytes of a block's first `rows` tokens from `content`, those of all, uint8 [block_bytes]."""
    found, offset = [], 0
    for layer in layout.layers:
        for region in layer.regions:
            own = content[offset + region.offset : offset + region.offset + region.nbytes]
            if region.nbytes:
                found.append(own.view(layer.geometry.kv_heads, -1, region.row_bytes)[:, :rows].flatten())
        offset += layer.nbytes
    return torch.cat(found)
