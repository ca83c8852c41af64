"""Digests of blocks, layouts and sequences, and seals for the headers stored with blocks."""

import hashlib
import json
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvq.blockmgr import Sequence
from kvq.cache.backend import CacheBackend
from kvq.formats import KVRecipe
from kvq.kernels.attend.options import AttentionOptions, parts_of
from kvq.layout import VERSION, GroupLayout, KVLayout, Role


def digest_context(layout: GroupLayout, recipe: KVRecipe) -> bytes:
    """Return everything that determines how the bytes of a layer group's blocks are interpreted."""
    return json.dumps([layout_numbers(layout), recipe.digest()], sort_keys=True).encode()


def block_digest(content: Tensor, place: int, context: bytes) -> bytes:
    """Return the 16-byte digest of `content`, host bytes uint8 [...], as stored at `place`: xxh3-128.

    `place` is the index of a stored block, so bytes moved elsewhere don't match. `context`: from
    `digest_context`.
    """
    hasher = xxhash.xxh3_128(context)
    hasher.update(place.to_bytes(8, "little"))
    hasher.update(content.numpy().data)
    return hasher.digest()


def layout_numbers(layout: GroupLayout) -> dict[str, object]:
    """Return all numbers that determine a value's position in a block's runs, in a form for JSON.

    The block order is not included, since `GroupLayout.runs` lists the same bytes for both orders.
    """
    states = [
        [one.number, one.tensor.name, one.tensor.index, list(one.tensor.shape), one.tensor.dtype, one.offset]
        for one in layout.states
    ]
    return {
        "layout_version": VERSION,
        "group": layout.group.index,
        "window": layout.group.window,
        "role": layout.role.value,
        "limit": layout.limit,
        "block_size": layout.block_size,
        "layers": [
            {
                "index": layer.geometry.index,
                "kv_heads": layer.geometry.kv_heads,
                "head_dims": [layer.geometry.k_head_dim, layer.geometry.v_head_dim],
                "formats": [layer.formats.k.name, layer.formats.v.name],
                "regions": [[region.offset, region.row_bytes, region.nbytes] for region in layer.regions],
                "nbytes": layer.nbytes,
            }
            for layer in layout.layers
        ],
        **({"states": states} if states else {}),
    }


def layout_digest(layout: KVLayout) -> str:
    """Return the SHA-256 digest, in hex, of all groups' `layout_numbers`."""
    numbers = json.dumps([layout_numbers(group) for group in layout.groups], sort_keys=True)
    return hashlib.sha256(numbers.encode()).hexdigest()


def header_text(header: dict[str, Any]) -> str:
    """Return the text of a header, as written to the file and sealed."""
    return json.dumps(header, sort_keys=True)


def seal(header: str) -> str:
    """Return the SHA-256 digest of a header's text, in hex."""
    return hashlib.sha256(header.encode()).hexdigest()


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
