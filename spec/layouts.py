"""Layer groups, regions of blocks and digests of both, from docs/spec.md."""

import json
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from codec import encode_block
from names import Format, parse
from recipes import read_recipe
from xxh3 import xxh3_128

from findings import check_keys, integer, items, need, sha256

MOST_BLOCK = 4096  # tokens
_MOST = (1 << 31) - 1
PARTS = ("k_codes", "v_codes", "k_scales", "v_scales", "k_means", "v_means")


@dataclass
class Group:
    """One layer group of a layout: its numbers, and the formats of its layers' K and V."""

    numbers: dict
    formats: list[tuple[Format, Format]]
    is_written: bool = True  # False: no token is ever sealed there

    @property
    def block_bytes(self) -> int:
        return sum(layer["nbytes"] for layer in self.numbers["layers"])

    def held(self, length: int) -> tuple[int, int]:
        """The first of the blocks that a prefix of whole blocks has here, and the end of them."""
        window, limit, size = (self.numbers[key] for key in ("window", "limit", "block_size"))
        first = 0 if window is None else max(0, length - window + 1) // size
        end = (length if limit is None else min(length, limit)) // size
        return min(first, end), end

    def layer_at(self, order: str, position: int, block: int, num_blocks: int) -> int:
        """Where a layer's part of a block begins in a pool."""
        sizes = [layer["nbytes"] for layer in self.numbers["layers"]]
        before = sum(sizes[:position])
        if order == "block-major":
            return block * self.block_bytes + before
        return before * num_blocks + block * sizes[position]


@dataclass
class Layout:
    """The layer groups of a model under a recipe."""

    recipe: dict
    groups: list[Group]
    block_size: int

    def digest(self) -> str:
        return sha256(json.dumps([group.numbers for group in self.groups], sort_keys=True))

    def recipe_digest(self) -> str:
        return sha256(json.dumps(self.recipe, sort_keys=True))

    def unwritten(self, group: int) -> int:
        """How many of a sequence's first blocks hold no token there."""
        own = self.groups[group]
        if not own.is_written:
            return _MOST
        return -(-self.recipe.get("sinks", 0) // self.block_size) if own.numbers["role"] == "sealed" else 0

    def block_digest(self, group: int, place: int, content: bytes) -> str:
        context = json.dumps([self.groups[group].numbers, self.recipe_digest()], sort_keys=True)
        return xxh3_128(context.encode() + place.to_bytes(8, "little") + content).hex()


def read_layout(data: dict) -> Layout:
    """Of {"geometry": [...], "block_size": n, "recipe": a kvq.json's object}."""
    check_keys(data, {"geometry", "block_size", "recipe"}, set(), "layout")
    recipe, size = read_recipe(data["recipe"]), integer(data["block_size"], "block_size", 1, MOST_BLOCK)
    geometry = items(data["geometry"], "geometry", len(recipe["layers"]))
    for i, layer in enumerate(geometry):
        _check_layer(layer, i, recipe)
    formats = [(parse(x["k"], x["k_head_dim"]), parse(x["v"], x["v_head_dim"])) for x in recipe["layers"]]
    windows = sorted({x["window"] for x in geometry}, key=lambda w: (w is not None, -(w or 0)))
    kinds = [[i for i, x in enumerate(geometry) if x["window"] == window] for window in windows]
    recent, sinks = recipe.get("recent", 0), -(-recipe.get("sinks", 0) // size) * size
    roles = [("sealed", None)]
    if any(f.mean or f.is_per_channel for pair in formats for f in pair) or recent or sinks:
        roles += [("recent", None)] + ([("sinks", sinks)] if sinks else [])
    groups = []
    for role, limit in roles:
        for window, layers in zip(windows, kinds, strict=True):
            own = [
                formats[i] if role == "sealed" else tuple(parse("bf16", f.dim) for f in formats[i])
                for i in layers
            ]
            outlasts = window is not None and window <= recent and len(roles) > 1
            held = recent + size if outlasts else window
            window = {"sealed": held, "recent": recent + size, "sinks": None}[role]
            numbers = {
                "layout_version": 1,
                "group": len(groups),
                "window": window,
                "role": role,
                "limit": limit,
            }
            parts = [
                _regions(i, geometry[i]["kv_heads"], pair, size) for i, pair in zip(layers, own, strict=True)
            ]
            numbers |= {"block_size": size, "layers": parts}
            groups.append(Group(numbers, own, is_written=role != "sealed" or not outlasts))
    return Layout(recipe, groups, size)


def _check_layer(layer: object, index: int, recipe: dict) -> None:
    """Raise Wrong unless a layer of the geometry is one, and what the recipe is for."""
    where, own = f"geometry[{index}]", recipe["layers"][index]
    check_keys(layer, {"kv_heads", "k_head_dim", "v_head_dim", "window"}, set(), where)
    heads = integer(layer["kv_heads"], f"{where}.kv_heads", 1, _MOST)
    if layer["window"] is not None:
        integer(layer["window"], f"{where}.window", 1, _MOST)
    for part in ("k", "v"):
        dim = own[f"{part}_head_dim"]
        integer(layer[f"{part}_head_dim"], f"{where}.{part}_head_dim", dim, dim)
        for name in ("static_scales", "centers"):
            lists = recipe[name] and recipe[name]["layers"][index][part]
            if lists is not None:
                items(lists, f"{name}.layers[{index}].{part}", heads)


def _plain(pair: tuple[Format, Format]) -> tuple[Format, Format]:
    """What stays unquantized."""
    return parse("bf16", pair[0].dim), parse("bf16", pair[1].dim)


def _regions(index: int, heads: int, pair: tuple[Format, Format], size: int) -> dict:
    k, v = pair
    rows = [(size, k.code_bytes), (size, v.code_bytes)]
    rows += [(1, f.channel_bytes) if f.is_per_channel else (size, f.scale_bytes) for f in pair]
    rows += [(1, k.mean_bytes), (1, v.mean_bytes)]
    sizes = [heads * count * row for count, row in rows]
    *offsets, end = accumulate((-(-n // 16) * 16 for n in sizes), initial=0)
    return {
        "index": index,
        "kv_heads": heads,
        "head_dims": [k.dim, v.dim],
        "formats": [k.name, v.name],
        "regions": [[at, row, n] for at, (_, row), n in zip(offsets, rows, sizes, strict=True)],
        "nbytes": end,
    }


def static_scale(recipe: dict, layer: int, part: str, fmt: Format) -> np.ndarray | None:
    """fp32 [kv_heads, 1, 1] of a format with static scales."""
    if not fmt.is_static:
        return None
    need(recipe["static_scales"] is not None, f"layers[{layer}].{part}: {fmt.name} without static scales")
    maxima = recipe["static_scales"]["layers"][layer][part + "_rotated" * fmt.rotated]
    need(maxima is not None, f"layers[{layer}].{part}: {fmt.name} without scales of what is rotated")
    largest = {"fp8": 448.0, "int8": 127.0}[fmt.code]
    return np.array([max(a / largest, 2.0**-126) for a in maxima], np.float32)[:, None, None]


def block_regions(layout: Layout, group: int, position: int, k: np.ndarray, v: np.ndarray) -> list[bytes]:
    """What a layer's part of a block holds, region by region, of fp32 [kv_heads, block_size, dim] each."""
    index, found = layout.groups[group].numbers["layers"][position]["index"], []
    for part, x, fmt in zip("kv", (k, v), layout.groups[group].formats[position], strict=True):
        clip = layout.recipe["layers"][index].get(f"{part}_clip", 1.0)
        static = static_scale(layout.recipe, index, part, fmt)
        found.append([y.tobytes() for y in encode_block(x, fmt, static, clip)])
    return [found[half][kind] for kind in range(3) for half in range(2)]
