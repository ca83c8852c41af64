"""kvq.json, from docs/spec.md: all keys, every digest. Whatever is wrong raises Wrong."""

import hashlib
import json

from names import parse

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


def check_keys(data: object, required: set[str], allowed: set[str], where: str) -> None:
    need(isinstance(data, dict), f"{where}: no JSON object")
    for key in sorted(required - set(data)):
        raise Wrong(f"{where}: no {key!r}")
    for key in sorted(set(data) - required - allowed):
        raise Wrong(f"{where}: unknown key {key!r}")


def _calibrated(data: dict, name: str, fields: tuple[str, ...], layers: int) -> dict:
    check_keys(data, {"model_digest", "text_digest", "tokens", "layers"}, set(), name)
    need(isinstance(data["tokens"], int) and data["tokens"] >= 0, f"{name}.tokens: no count")
    need(len(data["layers"]) == layers, f"{name}.layers: {len(data['layers'])}, expected {layers}")
    read = []
    for i, layer in enumerate(data["layers"]):
        where = f"{name}.layers[{i}]"
        check_keys(layer, {*fields, "digests"}, set(), where)
        least = 5e-324 if name == "static_scales" else -_LARGEST
        lists = {f: _floats(layer[f], f"{where}.{f}", least) for f in fields}
        check_keys(layer["digests"], set(fields), set(), f"{where}.digests")
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
    check_keys(layer, {"k", "v", "k_head_dim", "v_head_dim"}, {"k_clip", "v_clip", "digest"}, where)
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
        exact = "".join(f"+{name}={data[name]}" for name in ("sinks", "recent") if data.get(name))
        field = f"layer of {len(data['layers'])}{exact}"
        own["digest"] = field_digest(data["model_digest"], index, field, values)
        need(
            layer.get("digest") == own["digest"],
            f"{where}: its digest is {own['digest']}, not {layer.get('digest')}",
        )
    return own


def read_recipe(data: dict) -> dict:
    """A kvq.json as it is written and digested, all of it checked."""
    check_keys(
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
