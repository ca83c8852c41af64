"""Checks conformance vectors, prefix files and kvq.json against docs/spec.md. Needs numpy alone.

    python spec/check.py spec/vectors
    python spec/check.py my.kvqprefix --layout layout.json
    python spec/check.py kvq.json
    python spec/check.py /var/kvq-blocks

`layout.json` holds {"geometry": [{"kv_heads", "k_head_dim", "v_head_dim", "window"}, ...], "block_size",
"recipe": a kvq.json's object}. A folder may hold segments of blocks, as `--kv-dir` has
them. Exits 1, naming vector and field or bytes, if anything is wrong.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from codec import decode, encode, encode_block
from layouts import PARTS, block_regions, read_layout
from names import parse
from prefixes import chain, check_prefix
from recipes import read_recipe
from segments import SUFFIX, check_segment, check_segments

from findings import Wrong, load_json, need, sha256

_TYPES = {"fp32": "<f4", "uint8": "u1"}


def canonical(value: object) -> str:
    """The text of a vector's JSON file, of which no byte may differ."""
    return json.dumps(value, sort_keys=True) + "\n"


def same(found: bytes, expected: bytes, where: str) -> None:
    """Raise Wrong, naming the bytes, unless both are equal."""
    need(len(found) == len(expected), f"{where}: {len(found)} bytes, expected {len(expected)}")
    differing = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8))
    if differing.size:
        raise Wrong(f"{where}: {differing.size} bytes differ, within {differing[0]}..{differing[-1] + 1}")


def arrays(folder: Path, vector: dict) -> dict[str, np.ndarray]:
    """Its arrays by name."""
    found = {}
    for name, entry in vector["arrays"].items():
        raw, dtype = (folder / entry["file"]).read_bytes(), np.dtype(_TYPES[entry["dtype"]])
        count = int(np.prod(entry["shape"]))
        end = entry["offset"] + count * dtype.itemsize
        need(end <= len(raw), f"{name}: {entry['file']} ends before byte {end}")
        found[name] = np.frombuffer(raw, dtype, count, entry["offset"]).reshape(entry["shape"])
    return found


def check_rows(folder: Path, vector: dict) -> str:
    """Every row is encoded and decoded again."""
    found, count = arrays(folder, vector), 0
    for case in vector["cases"]:
        dim, fmt = case["dim"], parse(case["name"], case["dim"])
        asked = case["asked"]
        need(
            parse(asked, dim) == fmt and case["name"] == fmt.name, f"dim {dim}: {asked} is not {case['name']}"
        )
        static = None if case["static"] is None else np.float32(case["static"])
        x, codes, scales = (found[f"{dim}.{part}"] for part in ("input", "codes", "scales"))
        own_codes, own_scales = encode(x, fmt, static, vector["clip"])
        same(codes.tobytes(), own_codes.tobytes(), f"dim {dim}, codes [{len(x)}, {fmt.code_bytes}]")
        same(scales.tobytes(), own_scales.tobytes(), f"dim {dim}, scales [{len(x)}, {fmt.scale_bytes}]")
        same(
            found[f"{dim}.decoded"].tobytes(),
            decode(codes, scales, fmt, static).tobytes(),
            f"dim {dim}, decoded",
        )
        count += len(x)
    return f"{count} rows of {vector['format']} in {len(vector['cases'])} head dimensions"


def check_channels(folder: Path, vector: dict) -> str:
    """Whole blocks with scales per channel, encoded and decoded again."""
    found = arrays(folder, vector)
    for case in vector["cases"]:
        dim, size, fmt = case["dim"], case["block_size"], parse(case["name"], case["dim"])
        own = f"{dim}x{size}"
        x, codes, scales = (found[f"{own}.{part}"] for part in ("input", "codes", "scales"))
        need(x.shape[-2:] == (size, dim), f"{own}: blocks of {x.shape[-2:]}")
        expected = encode_block(x, fmt)
        same(codes.tobytes(), expected[0].tobytes(), f"{own}, codes [{len(x)}, {size}, {fmt.code_bytes}]")
        same(scales.tobytes(), expected[1].tobytes(), f"{own}, scales [{len(x)}, 1, {fmt.channel_bytes}]")
        same(found[f"{own}.decoded"].tobytes(), decode(codes, scales, fmt).tobytes(), f"{own}, decoded")
    return f"blocks of {vector['format']} in {len(vector['cases'])} sizes"


def check_blocks(folder: Path, vector: dict) -> str:
    """Every region of every block, in both orders."""
    found, layout, count = arrays(folder, vector), read_layout(vector["layout"]), vector["num_blocks"]
    need(len(vector["groups"]) == len(layout.groups), f"groups: {len(layout.groups)} expected")
    for g, group in enumerate(layout.groups):
        for key, value in group.numbers.items():
            need(vector["groups"][g][key] == value, f"groups[{g}].{key}: expected {value}")
        for order in ("layer-major", "block-major"):
            pool = found[f"group{g}.{order}"]
            need(
                pool.size == count * group.block_bytes,
                f"group{g}: {count * group.block_bytes} bytes expected",
            )
            _check_pool(found, layout, g, pool, order, count)
    return f"{count} blocks of {len(layout.groups)} layer groups, both orders"


def _check_pool(found: dict, layout, g: int, pool: np.ndarray, order: str, count: int) -> None:
    for position, layer in enumerate(layout.groups[g].numbers["layers"]):
        rows = [found[f"layer{layer['index']}.{part}"] for part in "kv"]
        for block in range(count):
            at = layout.groups[g].layer_at(order, position, block, count)
            expected = block_regions(layout, g, position, rows[0][block], rows[1][block])
            for part, (offset, _, nbytes), own in zip(PARTS, layer["regions"], expected, strict=True):
                where = (
                    f"group {g} {order}, block {block}, layer {layer['index']}, {part} at byte {at + offset}"
                )
                same(pool[at + offset : at + offset + nbytes].tobytes(), own, where)


def check_prefix_vector(folder: Path, vector: dict) -> str:
    """A prefix file, its tokens and the chain of the prefix index."""
    layout = read_layout(vector["layout"])
    header = check_prefix((folder / vector["file"]).read_bytes(), layout)
    own = chain(vector["tokens"], layout.block_size, bytes.fromhex(vector["identity"]), vector["tenant"])
    need(vector["chain"] == [x.hex() for x in own], "chain: other digests than those of the tokens")
    need(header["root"] == sha256(b"kvq prefix file root" + own[0]), "root: not that of identity and tenant")
    data = np.array(vector["tokens"][: header["length"]], "<u4").tobytes()
    need(header["tokens"] == sha256(data), "tokens: not the digest of the first tokens")
    return f"{header['length']} tokens, {sum(len(b) > 0 for b in header['blocks'])} layer groups"


def check_recipe(path: Path) -> str:
    """A kvq.json."""
    recipe = read_recipe(load_json(path.read_bytes(), path.name))
    return f"{len(recipe['layers'])} layers, recipe digest {sha256(json.dumps(recipe, sort_keys=True))}"


def check_recipe_vector(folder: Path, vector: dict) -> str:
    """A kvq.json whose digest is known."""
    said = check_recipe(folder / vector["file"])
    need(said.endswith(vector["digest"]), f"{vector['file']}: {said}, not {vector['digest']}")
    return said


_KINDS = {
    "rows": check_rows,
    "channels": check_channels,
    "blocks": check_blocks,
    "prefix": check_prefix_vector,
    "recipe": check_recipe_vector,
}


def check_vector(folder: Path, name: str) -> str:
    """What was checked of one vector; Wrong if anything is not as it should be."""
    try:
        text = (folder / name).read_bytes()
        vector = load_json(text, "vector")
        said = _KINDS[vector["kind"]](folder, vector)
        for array, entry in vector.get("arrays", {}).items():
            raw = arrays(folder, {"arrays": {array: entry}})[array].tobytes()
            need(sha256(raw) == entry["sha256"], f"{array} in {entry['file']}: other bytes than were made")
        need(text == canonical(vector).encode(), "its JSON is not written as it was made")
    except Wrong as wrong:
        raise Wrong(f"{name}: {wrong}") from wrong
    except (ValueError, KeyError, TypeError, OSError, AttributeError, IndexError, ArithmeticError) as error:
        raise Wrong(f"{name}: {type(error).__name__}: {error}") from error
    return f"{name}: {said}"


def check_index(folder: Path) -> dict[str, str]:
    """The digests of a folder's files, all of which are there."""
    try:
        text = (folder / "index.json").read_bytes()
        index = load_json(text, "text")
        files = index["files"]
        need(text == canonical(index).encode(), "not written as it was made")
        need(index["seal"] == sha256(canonical(files)), "the seal is not that of files")
        present = {path.name for path in folder.iterdir()} - {"index.json"}
        need(present == set(files), f"files: {sorted(present ^ set(files))} too many or missing")
    except Wrong as wrong:
        raise Wrong(f"index.json: {wrong}") from wrong
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Wrong(f"index.json: {error}") from error
    return dict(files)


def check_file(folder: Path, name: str, digest: str) -> None:
    """Raise Wrong unless a file holds the bytes that the index has the digest of."""
    need(sha256((folder / name).read_bytes()) == digest, f"{name}: other bytes than were made")


def check_folder(folder: Path) -> list[str]:
    """What was checked of all vectors; field by field first, then every file's digest."""
    files = check_index(folder)
    said = [check_vector(folder, name) for name in sorted(files) if name.endswith(".vector.json")]
    for name, digest in files.items():
        check_file(folder, name, digest)
    return said


def _told(path: Path, layout: str | None) -> list[str]:
    if path.is_dir() and any(path.rglob(f"*{SUFFIX}")):
        return check_segments(path)
    if path.suffix == SUFFIX:
        return [check_segment(path)]
    if path.is_dir():
        return check_folder(path)
    if path.suffix == ".json":
        return [check_recipe(path)]
    made = None if layout is None else read_layout(load_json(Path(layout).read_bytes(), layout))
    header = check_prefix(path.read_bytes(), made)
    return [
        f"{header['length']} tokens; "
        + ("all digests hold" if made else "the seal holds; blocks need --layout")
    ]


def main() -> int:  # D81: shares no line with kvq
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", type=Path, help="a folder of vectors or segments, a segment, a prefix file, or a kvq.json"
    )
    parser.add_argument("--layout", help="JSON of the layout that a prefix file was made for")
    options = parser.parse_args()
    try:
        print("\n".join(_told(options.path, options.layout)))
    except (Wrong, OSError, ValueError) as error:
        print(f"wrong: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
