"""kvq.json, from docs/spec.md: all keys, every digest. Whatever is wrong raises Wrong."""

import json
from itertools import pairwise

from names import parse

from findings import Wrong, check_keys, integer, items, need, sha256, text

MOST_DIM = 65536  # elements of a row
_LARGEST = float.fromhex("0x1.fffffep127")


def field_digest(model: str, layer: int, field: str, values: object) -> str:
    return sha256(json.dumps([model, layer, field, values]))[:16]


def _number(value: object, where: str, least: float = -_LARGEST, most: float = _LARGEST) -> float:
    need(
        isinstance(value, int | float) and not isinstance(value, bool), f"{where}: {value!r:.40} is no number"
    )
    need(least <= value <= most, f"{where}: {value!r:.40} is out of range")
    return float(value)


def _numbers(values: object, where: str, least: float = -_LARGEST) -> list[float]:
    return [_number(x, f"{where}[{i}]", least) for i, x in enumerate(items(values, where))]


def _maxima(layer: dict, where: str) -> dict:
    """Per KV head one number above 0, or null for what is rotated."""
    heads = len(items(layer["k"], f"{where}.k"))
    known = [f for f in _FIELDS["static_scales"] if layer[f] is not None or not f.endswith("_rotated")]
    for field in known:
        items(layer[field], f"{where}.{field}", heads)
    return dict.fromkeys(layer) | {f: _numbers(layer[f], f"{where}.{f}", 5e-324) for f in known}


def _means(layer: dict, where: str) -> dict:
    """Null, or per KV head a list of one number per channel."""
    found = {}
    for part in _FIELDS["centers"]:
        rows, at = layer[part], f"{where}.{part}"
        if rows is not None:
            rows = [_numbers(row, f"{at}[{head}]") for head, row in enumerate(items(rows, at))]
            need(all(len(a) == len(b) for a, b in pairwise(rows)), f"{at}: heads of different lengths")
        found[part] = rows
    return found


_FIELDS = {"static_scales": ("k", "v", "k_rotated", "v_rotated"), "centers": ("k", "v")}
_READ = {"static_scales": _maxima, "centers": _means}


def _calibrated(data: object, name: str, layers: int) -> dict | None:
    if data is None:
        return None
    check_keys(data, {"model_digest", "text_digest", "tokens", "layers"}, set(), name)
    for key in ("model_digest", "text_digest"):
        text(data[key], f"{name}.{key}")
    integer(data["tokens"], f"{name}.tokens", 0, 1 << 64)
    read = []
    for i, layer in enumerate(items(data["layers"], f"{name}.layers", layers)):
        where, fields = f"{name}.layers[{i}]", _FIELDS[name]
        check_keys(layer, {*fields, "digests"}, set(), where)
        lists = _READ[name](layer, where)
        check_keys(layer["digests"], set(fields), set(), f"{where}.digests")
        for f in fields:
            digest, found = field_digest(data["model_digest"], i, f, lists[f]), layer["digests"][f]
            need(found == digest, f"{where}.{f}: its digest is {digest}, not {found!r:.40}")
        read.append({**lists, "digests": layer["digests"]})
    return {**data, "layers": read}


def _layer(layer: object, index: int, data: dict, centers: dict | None) -> dict:
    where = f"layers[{index}]"
    check_keys(layer, {"k", "v", "k_head_dim", "v_head_dim"}, {"k_clip", "v_clip", "digest"}, where)
    own = {}
    for part in ("k", "v"):
        dim = integer(layer[f"{part}_head_dim"], f"{where}.{part}_head_dim", 1, MOST_DIM)
        try:
            fmt = parse(text(layer[part], f"{where}.{part}"), dim)
        except ValueError as error:
            raise Wrong(f"{where}.{part}: {error}") from error
        clip = _number(layer.get(f"{part}_clip", 1.0), f"{where}.{part}_clip", 0.1, 1)
        grouped = fmt.code == "int2" and not fmt.is_per_channel
        need(clip == 1 or grouped, f"{where}.{part}_clip: {clip} is for int2 in groups, not {fmt.name}")
        own |= {part: fmt.name, f"{part}_head_dim": dim} | ({f"{part}_clip": clip} if clip != 1 else {})
        rows = None if centers is None else centers["layers"][index][part]
        if rows is not None:
            need(fmt.group > 0, f"centers.{where}.{part}: belongs to {fmt.name}, which is not grouped")
            need(len(rows[0]) == dim, f"centers.{where}.{part}: {len(rows[0])} channels, expected {dim}")
    if data.get("model_digest"):
        values = [own["k"], own["v"], own["k_head_dim"], own["v_head_dim"]]
        values += [own.get("k_clip", 1.0), own.get("v_clip", 1.0)]
        values += [centers is not None and centers["layers"][index][part] is not None for part in ("k", "v")]
        exact = "".join(f"+{name}={data[name]}" for name in ("sinks", "recent") if data.get(name))
        field = f"layer of {len(data['layers'])}{exact}"
        own["digest"] = field_digest(data["model_digest"], index, field, values)
        found = layer.get("digest")
        need(found == own["digest"], f"{where}: its digest is {own['digest']}, not {found!r:.40}")
    else:
        need("digest" not in layer, f"{where}: a digest without a model_digest")
    return own


def read_recipe(data: object) -> dict:
    """A kvq.json as it is written and digested, all of it checked."""
    check_keys(
        data,
        {"format_version", "layers", "static_scales"},
        {"centers", "model_digest", "sinks", "recent"},
        "kvq.json",
    )
    integer(data["format_version"], "format_version", 2, 2)
    count = len(items(data["layers"], "layers"))
    static = _calibrated(data["static_scales"], "static_scales", count)
    centers = _calibrated(data.get("centers"), "centers", count)
    if data.get("model_digest") is not None:
        text(data["model_digest"], "model_digest")
    exact = {key: integer(data.get(key, 0), key, 0, 65536) for key in ("sinks", "recent")}
    return {
        "format_version": 2,
        "model_digest": data.get("model_digest") or None,
        "layers": [_layer(layer, i, data, centers) for i, layer in enumerate(data["layers"])],
        "static_scales": static,
        "centers": centers,
        **{key: value for key, value in exact.items() if value},
    }
