"""Recipes, layouts, block pools and prefix files, from docs/spec.md. Whatever is wrong raises Wrong."""

import hashlib
import json
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from codec import Format, encode_block, parse
from xxh3 import xxh3_128

PARTS = ("k_codes", "v_codes", "k_scales", "v_scales", "k_means", "v_means")
_HEADER = {"format_version", "layout", "recipe", "root", "length", "tokens", "starts", "blocks"}
_LARGEST = float.fromhex("0x1.fffffep127")


class Wrong(Exception):
    """What is not as the specification says, and where."""


def need(holds: bool, what: str) -> None:
    """Raise Wrong unless something holds."""
    if not holds:
        raise Wrong(what)


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def field_digest(model: str, layer: int, field: str, values: object) -> str:
    return sha256(json.dumps([model, layer, field, values]))[:16]


def _floats(values: object, where: str, least: float = -_LARGEST) -> object:
    """Lists of numbers as lists of floats, null as it is."""
    if isinstance(values, list) and values:
        return [_floats(x, f"{where}[{i}]", least) for i, x in enumerate(values)]
    if values is None:
        return None
    need(
        isinstance(values, int | float) and not isinstance(values, bool),
        f"{where}: {values!r:.40} is no number",
    )
    need(least <= values <= _LARGEST, f"{where}: {values!r:.40} is out of range")
    return float(values)


def _keys(data: object, required: set[str], allowed: set[str], where: str) -> None:
    need(isinstance(data, dict), f"{where}: no JSON object")
    for key in sorted(required - set(data)):
        raise Wrong(f"{where}: no {key!r}")
    for key in sorted(set(data) - required - allowed):
        raise Wrong(f"{where}: unknown key {key!r}")


def _calibrated(data: dict, name: str, fields: tuple[str, ...], layers: int) -> dict:
    _keys(data, {"model_digest", "text_digest", "tokens", "layers"}, set(), name)
    need(isinstance(data["tokens"], int) and data["tokens"] >= 0, f"{name}.tokens: no count")
    need(len(data["layers"]) == layers, f"{name}.layers: {len(data['layers'])}, expected {layers}")
    read = []
    for i, layer in enumerate(data["layers"]):
        where = f"{name}.layers[{i}]"
        _keys(layer, {*fields, "digests"}, set(), where)
        least = 5e-324 if name == "static_scales" else -_LARGEST
        lists = {f: _floats(layer[f], f"{where}.{f}", least) for f in fields}
        _keys(layer["digests"], set(fields), set(), f"{where}.digests")
        for f in fields:
            digest = field_digest(data["model_digest"], i, f, lists[f])
            need(
                layer["digests"][f] == digest,
                f"{where}.{f}: its digest is {digest}, not {layer['digests'][f]}",
            )
        read.append({**lists, "digests": layer["digests"]})
    return {**data, "layers": read}


def _layer(layer: dict, index: int, data: dict, centers: dict | None) -> dict:
    where = f"layers[{index}]"
    _keys(layer, {"k", "v", "k_head_dim", "v_head_dim"}, {"k_clip", "v_clip", "digest"}, where)
    own = {"k_head_dim": layer["k_head_dim"], "v_head_dim": layer["v_head_dim"]}
    for part in ("k", "v"):
        try:
            fmt = parse(layer[part], layer[f"{part}_head_dim"])
        except (ValueError, TypeError) as error:
            raise Wrong(f"{where}.{part}: {error}") from error
        clip = layer.get(f"{part}_clip", 1.0)
        need(0.1 <= clip <= 1 and (clip == 1 or fmt.code == "int2"), f"{where}.{part}_clip: {clip} can't be")
        own |= {part: fmt.name} | ({f"{part}_clip": clip} if clip != 1 else {})
    if data.get("model_digest"):
        values = [own["k"], own["v"], own["k_head_dim"], own["v_head_dim"]]
        values += [own.get("k_clip", 1.0), own.get("v_clip", 1.0)]
        values += [centers is not None and centers["layers"][index][part] is not None for part in ("k", "v")]
        own["digest"] = field_digest(data["model_digest"], index, f"layer of {len(data['layers'])}", values)
        need(
            layer.get("digest") == own["digest"],
            f"{where}: its digest is {own['digest']}, not {layer.get('digest')}",
        )
    return own


def read_recipe(data: dict) -> dict:
    """A kvq.json as it is written and digested, all of it checked."""
    _keys(
        data,
        {"format_version", "layers", "static_scales"},
        {"centers", "model_digest", "sinks", "recent"},
        "kvq.json",
    )
    need(data["format_version"] == 2, f"format_version: {data['format_version']!r}, not 2")
    count = len(data["layers"])
    need(count > 0, "layers: there is none")
    static, centers = data["static_scales"], data.get("centers")
    if static is not None:
        static = _calibrated(static, "static_scales", ("k", "v", "k_rotated", "v_rotated"), count)
    if centers is not None:
        centers = _calibrated(centers, "centers", ("k", "v"), count)
    exact = {}
    for key in ("sinks", "recent"):
        value = data.get(key, 0)
        need(type(value) is int and 0 <= value <= 65536, f"{key}: {value!r} is no number of tokens")
        exact |= {key: value} if value else {}
    return {
        "format_version": 2,
        "model_digest": data.get("model_digest") or None,
        "layers": [_layer(layer, i, data, centers) for i, layer in enumerate(data["layers"])],
        "static_scales": static,
        "centers": centers,
        **exact,
    }


@dataclass
class Group:
    """One layer group of a layout: its numbers, and the formats of its layers' K and V."""

    numbers: dict
    formats: list[tuple[Format, Format]]

    @property
    def block_bytes(self) -> int:
        return sum(layer["nbytes"] for layer in self.numbers["layers"])

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

    def block_digest(self, group: int, place: int, content: bytes) -> str:
        context = json.dumps([self.groups[group].numbers, self.recipe_digest()], sort_keys=True)
        return xxh3_128(context.encode() + place.to_bytes(8, "little") + content).hex()


def read_layout(data: dict) -> Layout:
    """Of {"geometry": [...], "block_size": n, "recipe": a kvq.json's object}."""
    _keys(data, {"geometry", "block_size", "recipe"}, set(), "layout")
    recipe, size, geometry = read_recipe(data["recipe"]), data["block_size"], data["geometry"]
    need(len(geometry) == len(recipe["layers"]), "layout: geometry and recipe have other numbers of layers")
    formats = [(parse(x["k"], x["k_head_dim"]), parse(x["v"], x["v_head_dim"])) for x in recipe["layers"]]
    windows = sorted({x["window"] for x in geometry}, key=lambda w: (w is not None, -(w or 0)))
    kinds = [[i for i, x in enumerate(geometry) if x["window"] == window] for window in windows]
    recent, sinks = recipe.get("recent", 0), -(-recipe.get("sinks", 0) // size) * size
    roles = [("sealed", None)]
    if any(k.mean or v.mean for k, v in formats) or recent or sinks:
        roles += [("recent", None)] + ([("sinks", sinks)] if sinks else [])
    groups = []
    for role, limit in roles:
        for window, layers in zip(windows, kinds, strict=True):
            own = [
                formats[i] if role == "sealed" else tuple(parse("bf16", f.dim) for f in formats[i])
                for i in layers
            ]
            window = {"sealed": window, "recent": recent + size, "sinks": None}[role]
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
            groups.append(Group({**numbers, "block_size": size, "layers": parts}, own))
    return Layout(recipe, groups, size)


def _plain(pair: tuple[Format, Format]) -> tuple[Format, Format]:
    """What stays unquantized."""
    return parse("bf16", pair[0].dim), parse("bf16", pair[1].dim)


def _regions(index: int, heads: int, pair: tuple[Format, Format], size: int) -> dict:
    k, v = pair
    rows = [(size, k.code_bytes), (size, v.code_bytes), (size, k.scale_bytes), (size, v.scale_bytes)]
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


def read_prefix(raw: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """The header of a prefix file, and its blocks by name, its container and seal checked."""
    need(len(raw) >= 8, "bytes 0..8: the file is cut short")
    size = int.from_bytes(raw[:8], "little")
    need(size % 8 == 0 and 8 + size <= len(raw), "bytes 0..8: no length of a header")
    try:
        container = json.loads(raw[8 : 8 + size])
        metadata = container.pop("__metadata__")
        header = json.loads(metadata["kvq"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Wrong(f"bytes 8..{8 + size}: no safetensors header of a prefix file ({error})") from error
    need(set(metadata) == {"kvq", "seal"}, "__metadata__: keys other than kvq and seal")
    need(metadata["seal"] == sha256(metadata["kvq"]), "__metadata__: the seal is not that of the header kvq")
    need(metadata["kvq"] == json.dumps(header, sort_keys=True), "__metadata__.kvq: not the canonical text")
    _keys(header, _HEADER, set(), "__metadata__.kvq")
    need(header["format_version"] == 1, f"format_version: {header['format_version']!r}, not 1")
    tensors, end = {}, 8 + size
    for name, entry in sorted(container.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = (8 + size + at for at in entry["data_offsets"])
        count, width = entry["shape"]
        fits = entry["dtype"] == "U8" and begin == end and stop - begin == count * width and stop <= len(raw)
        need(fits, f"{name}: dtype, shape and data_offsets don't fit each other")
        tensors[name], end = np.frombuffer(raw, np.uint8, count * width, begin).reshape(count, width), stop
    need(end == len(raw), f"bytes {end}..{len(raw)}: behind the last tensor")
    need(
        set(tensors) == {f"group.{i}" for i in range(len(header["starts"]))},
        "tensors other than group.0, group.1 ...",
    )
    return header, tensors


def check_prefix(raw: bytes, layout: Layout | None = None) -> dict:
    """The header of a prefix file; with a layout its digests are checked too."""
    header, tensors = read_prefix(raw)
    if layout is None:
        return header
    need(header["layout"] == layout.digest(), f"layout: the digest of this layout is {layout.digest()}")
    need(
        header["recipe"] == layout.recipe_digest(),
        f"recipe: the digest of this recipe is {layout.recipe_digest()}",
    )
    total, rest = divmod(header["length"], layout.block_size)
    need(
        not rest and total > 0,
        f"length: {header['length']} tokens are no whole blocks of {layout.block_size}",
    )
    need(
        len(header["starts"]) == len(header["blocks"]) == len(layout.groups),
        "starts, blocks: one per layer group",
    )
    for i, (start, digest) in enumerate(zip(header["starts"], header["blocks"], strict=True)):
        blocks, shape = tensors[f"group.{i}"], (total - start, layout.groups[i].block_bytes)
        need(blocks.shape == shape, f"group.{i}: shape {list(blocks.shape)}, expected {list(shape)}")
        found = layout.block_digest(i, start, blocks.tobytes())
        need(found == digest, f"blocks[{i}]: the digest of group.{i}'s bytes is {found}, not {digest}")
    return header


def chain(tokens: list[int], block_size: int, identity: bytes, tenant: str) -> list[bytes]:
    """The root of a tenant's prefix index and the digests of the full blocks of some tokens."""
    digest = hashlib.sha256
    found = [digest(b"kvq-prefix-1" + digest(identity).digest() + b"t" + tenant.encode()).digest()]
    data = np.array(tokens, "<u4").tobytes()
    for at in range(0, len(tokens) // block_size * block_size, block_size):
        found.append(digest(found[-1] + data[4 * at : 4 * (at + block_size)]).digest())
    return found
