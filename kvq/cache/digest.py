"""Digests of blocks: of their bytes, and of everything that decides how those bytes are read."""

import json

import xxhash
from torch import Tensor

from kvq.formats import KVRecipe
from kvq.layout import VERSION, GroupLayout


class BlockDigests:
    """xxh3-128 digests of one layer group's blocks, bound to a layout, a recipe and a place."""

    def __init__(self, layout: GroupLayout, recipe: KVRecipe) -> None:
        self._context = json.dumps([layout_numbers(layout), recipe.digest()], sort_keys=True).encode()

    def of(self, content: Tensor, place: int) -> bytes:
        """The digest of `content`, host bytes uint8 [...], as stored at `place`: 16 bytes.

        `place` is a host slot, or the index of a stored block: bytes moved elsewhere don't match.
        """
        hasher = xxhash.xxh3_128(self._context)
        hasher.update(place.to_bytes(8, "little"))
        hasher.update(content.numpy().data)
        return hasher.digest()


def layout_numbers(layout: GroupLayout) -> dict[str, object]:
    """Every number that decides where a value lies in a block's runs, as JSON can hold it.

    The block order is not among them: `GroupLayout.runs` lists the same bytes in both.
    """
    return {
        "layout_version": VERSION,
        "group": layout.group.index,
        "window": layout.group.window,
        "block_size": layout.block_size,
        "layers": [
            {
                "index": layer.geometry.index,
                "kv_heads": layer.geometry.kv_heads,
                "head_dims": [layer.geometry.k_head_dim, layer.geometry.v_head_dim],
                "formats": [layer.formats.k.name, layer.formats.v.name],
                "regions": [
                    [region.offset, region.row_bytes, region.nbytes]
                    for region in (layer.k_codes, layer.v_codes, layer.k_scales, layer.v_scales)
                ],
                "nbytes": layer.nbytes,
            }
            for layer in layout.layers
        ],
    }
