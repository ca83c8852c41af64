"""Prefix files and the digests of the prefix index, from docs/spec.md."""

import hashlib
import json

import numpy as np
from layouts import Layout

from findings import check_keys, integer, items, load_json, need, sha256, text

_MOST_BYTES = (1 << 63) - 1
_HEADER = {"format_version", "layout", "recipe", "root", "length", "tokens", "starts", "blocks"}


def read_prefix(raw: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """The header of a prefix file, and its blocks by name, its container and seal checked."""
    need(len(raw) >= 8, "bytes 0..8: the file is cut short")
    size = int.from_bytes(raw[:8], "little")
    need(size % 8 == 0 and 8 + size <= len(raw), "bytes 0..8: no length of a header")
    need(raw[8 : 8 + size].rstrip(b" ").endswith(b"}"), "safetensors header: padded by other than spaces")
    where = f"bytes 8..{8 + size}"
    need(raw[8:9] == b"{", f"{where}: no safetensors header")
    container = load_json(raw[8 : 8 + size], where)
    metadata = container.pop("__metadata__", None)
    check_keys(metadata, {"kvq", "seal"}, set(), "__metadata__")
    for key in ("kvq", "seal"):
        text(metadata[key], f"__metadata__.{key}")
    header = load_json(metadata["kvq"], "__metadata__.kvq")
    need(metadata["seal"] == sha256(metadata["kvq"]), "__metadata__: the seal is not that of the header kvq")
    need(metadata["kvq"] == json.dumps(header, sort_keys=True), "__metadata__.kvq: not the canonical text")
    check_keys(header, _HEADER, set(), "__metadata__.kvq")
    integer(header["format_version"], "format_version", 1, 1)
    integer(header["length"], "length", 1, _MOST_BYTES)
    count = len(items(header["starts"], "starts"))
    for i, start in enumerate(header["starts"]):
        integer(start, f"starts[{i}]", 0, header["length"])
    for i, digest in enumerate(items(header["blocks"], "blocks", count)):
        text(digest, f"blocks[{i}]")
    for key in ("layout", "recipe", "root", "tokens"):
        text(header[key], key)
    names = {f"group.{i}" for i in range(count)}
    need(
        set(container) == names, f"tensors: {sorted(container)!r:.80}, expected group.0 to group.{count - 1}"
    )
    return header, _tensors(container, raw, 8 + size)


def _tensors(container: dict, raw: bytes, end: int) -> dict[str, np.ndarray]:
    """The blocks by name, which lie one after the other from `end` on."""
    tensors, data = {}, np.frombuffer(raw, np.uint8)
    for name, entry in container.items():
        check_keys(entry, {"dtype", "shape", "data_offsets"}, set(), name)
        for key in ("shape", "data_offsets"):
            for value in items(entry[key], f"{name}.{key}", 2):
                integer(value, f"{name}.{key}", 0, _MOST_BYTES)
    start = end
    for name, entry in sorted(container.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = (start + at for at in entry["data_offsets"])
        count, width = entry["shape"]
        fits = entry["dtype"] == "U8" and begin == end and stop - begin == count * width and stop <= len(raw)
        need(fits, f"{name}: dtype, shape and data_offsets don't fit each other")
        tensors[name], end = data[begin:stop].reshape(count, width), stop
    need(end == len(raw), f"bytes {end}..{len(raw)}: behind the last tensor")
    return tensors


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
    items(header["starts"], "starts", len(layout.groups))
    for i, (start, digest) in enumerate(zip(header["starts"], header["blocks"], strict=True)):
        group = layout.groups[i]
        first, end = group.held(header["length"])
        need(start == first, f"starts[{i}]: {start}, expected {first}")
        blocks, shape = tensors[f"group.{i}"], (end - first, group.block_bytes)
        need(blocks.shape == shape, f"group.{i}: shape {list(blocks.shape)}, expected {list(shape)}")
        unwritten = max(0, layout.unwritten(i) - start)
        need(not blocks[:unwritten].any(), f"group.{i}: bytes of blocks that hold no token are not 0")
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
