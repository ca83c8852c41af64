"""Prefix files and the digests of the prefix index, from docs/spec.md."""

import hashlib
import json

import numpy as np
from layouts import Layout
from recipes import Wrong, check_keys, need, sha256

_HEADER = {"format_version", "layout", "recipe", "root", "length", "tokens", "starts", "blocks"}


def read_prefix(raw: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """The header of a prefix file, and its blocks by name, its container and seal checked."""
    need(len(raw) >= 8, "bytes 0..8: the file is cut short")
    size = int.from_bytes(raw[:8], "little")
    need(size % 8 == 0 and 8 + size <= len(raw), "bytes 0..8: no length of a header")
    need(raw[8 : 8 + size].rstrip(b" ").endswith(b"}"), "safetensors header: padded by other than spaces")
    try:
        container = json.loads(raw[8 : 8 + size])
        metadata = container.pop("__metadata__")
        header = json.loads(metadata["kvq"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Wrong(f"bytes 8..{8 + size}: no safetensors header of a prefix file ({error})") from error
    need(set(metadata) == {"kvq", "seal"}, "__metadata__: keys other than kvq and seal")
    need(metadata["seal"] == sha256(metadata["kvq"]), "__metadata__: the seal is not that of the header kvq")
    need(metadata["kvq"] == json.dumps(header, sort_keys=True), "__metadata__.kvq: not the canonical text")
    check_keys(header, _HEADER, set(), "__metadata__.kvq")
    need(header["format_version"] == 1, f"format_version: {header['format_version']!r}, not 1")
    tensors, end = {}, 8 + size
    for name, entry in sorted(container.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = (8 + size + at for at in entry["data_offsets"])
        count, width = entry["shape"]
        fits = entry["dtype"] == "U8" and begin == end and stop - begin == count * width and stop <= len(raw)
        need(fits, f"{name}: dtype, shape and data_offsets don't fit each other")
        tensors[name], end = np.frombuffer(raw[begin:stop], np.uint8).reshape(count, width), stop
    need(end == len(raw), f"bytes {end}..{len(raw)}: behind the last tensor")
    need(
        set(tensors) == {f"group.{i}" for i in range(len(header["starts"]))},
        "tensors other than group.0, group.1 ...",
    )
    return header, tensors


def check_prefix(raw: bytes, layout: Layout | None = None) -> dict:
    """The header of a prefix file; with a layout its digests are checked too."""
    try:
        header, tensors = read_prefix(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Wrong(f"safetensors header: {type(error).__name__}: {error}") from error
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
        group = layout.groups[i]
        first, end = group.held(header["length"])
        need(start == first, f"starts[{i}]: {start}, expected {first}")
        blocks, shape = tensors[f"group.{i}"], (end - first, group.block_bytes)
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
