"""Prefix files: the blocks of a prompt's indexed prefix, saved once and restored later.

A file is in safetensors format: one uint8 tensor [blocks, block_bytes] per layer group, with codes and
scales, and a sealed header. The file is valid only for the model, recipe, layout, salt and tokens that it was
made for. Any mismatch or damage counts as a miss, and the tokens are computed again.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

from kvq import fileio
from kvq.blockmgr.manager import BlockManager
from kvq.blockmgr.pool import BlockId
from kvq.blockmgr.prefix import TOKEN_BYTES, PrefixIndex, PrefixQuery
from kvq.cache.digests import block_digest, digest_context, header_text, layout_digest, seal
from kvq.cache.kv_cache import KVCache
from kvq.errors import ConfigError, OutOfBlocks, first_lines

_log = logging.getLogger("kvq")
FORMAT_VERSION = 1
_HEADER_LIMIT = 1 << 20  # bytes


class _Miss(Exception):
    """File that can't be used. This exception never leaves the module."""


def save_prefix(path: str | Path, cache: KVCache, manager: BlockManager, prompt: PrefixQuery) -> int:
    """Write the longest indexed prefix of a prompt, in complete blocks, to a file.

    The file appears complete or not at all. Only its owner can read it, since K and V reveal the text.
    Returns the number of tokens saved.

    Raises:
        ConfigError: no complete block of the prompt is indexed, the file can't be written, the block
            manager has no identity or does not belong to the cache, or orders are pending.
    """
    _check_pair(cache, manager)
    fileio.check_writable(path)
    length, starts, tables = manager.prefixes.held(prompt)
    if not length:
        raise ConfigError(
            f"can't save a prefix to {path}: no whole block of {manager.block_size} tokens of this prompt "
            f"is in the cache; run the prompt first"
        )
    tensors = {
        _name(group): _blocks(cache, group, start, table[start:])
        for group, (start, table) in enumerate(zip(starts, tables, strict=True))
    }
    digests = [_digest(cache, g, start, tensors[_name(g)]) for g, start in enumerate(starts)]
    header = header_text(_header(cache, prompt, length, starts, digests))
    content = save(tensors, metadata={"kvq": header, "seal": seal(header)})
    fileio.write_bytes(path, content, permissions=fileio.PRIVATE)
    return length


def load_prefix(path: str | Path, cache: KVCache, manager: BlockManager, prompt: PrefixQuery) -> int:  # D76
    """Restore a prefix that `save_prefix` wrote, if `prompt` starts with this prefix.

    Returns the number of the prompt's tokens that are now in the prefix index for `start` to reuse. If the
    file does not match or is damaged, logs the reason and returns 0. In that case, nothing is changed, except
    that other cached blocks may have been evicted.

    Raises:
        ConfigError: the file doesn't exist or can't be read, the block manager has no identity or
            does not belong to the cache, or orders are pending.
    """
    _check_pair(cache, manager)
    try:
        return _restore(*_read(path, cache, prompt), cache, manager, prompt)
    except _Miss as miss:
        _log.warning("prefix file %s is not used: %s", path, miss)
        return 0


def _restore(
    header: dict[str, Any], tensors: list[Tensor], cache: KVCache, manager: BlockManager, prompt: PrefixQuery
) -> int:
    """Write checked blocks to the cache. They are indexed only after the last block is written."""
    held, _, _ = manager.prefixes.held(prompt)
    length: int = header["length"]
    if held >= length:
        return length
    try:
        sequence = manager.adopt(prompt, length)
    except OutOfBlocks as error:
        raise _Miss(str(error)) from error
    try:
        if sequence.starts != header["starts"]:
            raise _Miss("the block manager's windows are others than the layout's")
        for group, (start, table) in enumerate(zip(sequence.starts, sequence.tables, strict=True)):
            for block, content in zip(table[start:], tensors[group], strict=True):
                cache.write_block(group, block, content)
        manager.commit(sequence)
    finally:
        manager.free(sequence)
    return length


def _read(path: str | Path, cache: KVCache, prompt: PrefixQuery) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a file's header and its blocks by group, after checking them against the cache and prompt."""
    blocks = len(prompt.tokens) // cache.layout.block_size
    limit = _HEADER_LIMIT + sum(group.pool_bytes(blocks) for group in cache.layout.groups)
    raw = _content(path, limit=limit)
    found = _sealed_header(raw)
    length, starts = found.get("length"), found.get("starts")
    if type(length) is not int or not isinstance(starts, list):
        raise _Miss("its header has no length or no starts")
    total, rest = divmod(length, cache.layout.block_size)
    if found.get("layout") != layout_digest(cache.layout):
        raise _Miss("it was made for another layout: block size, layers or their formats differ")
    if rest or not 0 < length <= len(prompt.tokens):
        raise _Miss(f"it holds {length} tokens, the prompt has {len(prompt.tokens)}")
    groups = cache.layout.groups
    if len(starts) != len(groups) or any(
        type(start) is not int or not 0 <= start <= total for start in starts
    ):
        raise _Miss("its header names blocks that can't be")
    ends = [total if group.limit is None else min(total, group.limit // group.block_size) for group in groups]
    tensors = _tensors(raw, cache, [end - start for start, end in zip(starts, ends, strict=True)])
    digests = [_digest(cache, g, start, tensors[g]) for g, start in enumerate(starts)]
    header = _header(cache, prompt, length, starts, digests)
    for name, reason in {
        "format_version": "another version of kvq made it",
        "recipe": "it was made for another recipe",
        "root": "it was made for another model, recipe or salt",
        "tokens": "it holds other tokens than the prompt starts with",
        "blocks": "its blocks are damaged",
    }.items():
        if found.get(name) != header[name]:
            raise _Miss(reason)
    if header_text(found) != header_text(header):
        raise _Miss("its header holds more than that of this version")
    return header, tensors


def _content(path: str | Path, *, limit: int) -> bytes:
    try:
        if not Path(path).is_file():
            what = "it is not a regular file" if Path(path).exists() else "there is no such file"
            raise ConfigError(f"can't load a prefix from {path}: {what}; write one with save_prefix")
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"can't load a prefix from {path}: {why}; name a file that can be read") from error
    if len(raw) > limit:
        raise _Miss("it is larger than all blocks of this prompt")
    return raw


def _sealed_header(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a file's metadata, which must have a valid seal."""
    size = int.from_bytes(raw[:8], "little")
    try:
        metadata = json.loads(raw[8 : 8 + size])["__metadata__"]
        text, found = metadata.pop("kvq"), metadata.pop("seal")
        if metadata or found != seal(text):
            raise _Miss("its header is damaged")
        header = json.loads(text)
        if not isinstance(header, dict) or text != header_text(header):
            raise _Miss("its header is not written as kvq writes it")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _Miss("it is cut short, damaged or no prefix file") from error
    return header


def _tensors(raw: bytes, cache: KVCache, counts: list[int]) -> list[Tensor]:
    """Return the blocks by group, uint8 [counts[g], block_bytes]. Only their shapes and sizes are checked."""
    try:
        found = dict(deserialize(raw))
    except SafetensorError as error:
        raise _Miss(f"it is cut short or damaged: {first_lines(error)}") from error
    tensors = []
    for group, (layout, count) in enumerate(zip(cache.layout.groups, counts, strict=True)):
        entry = found.pop(_name(group), {})
        shape = [count, layout.block_bytes]
        if entry.get("dtype") != "U8" or entry.get("shape") != shape:
            raise _Miss(f"the blocks of layer group {group} are missing or of another size")
        data = entry["data"]
        content = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        tensors.append(content.view(shape))
    if found:
        raise _Miss("it holds more than the blocks of its layer groups")
    return tensors


def _header(
    cache: KVCache, prompt: PrefixQuery, length: int, starts: list[int], digests: list[str]
) -> dict[str, Any]:
    """Return the header of a file. All digests are in hex. Salt and tokens appear only as digests."""
    return {
        "format_version": FORMAT_VERSION,
        "layout": layout_digest(cache.layout),
        "recipe": cache.layout.recipe.digest(),
        # digest of the model, the recipe and the salt, as the block manager computes it
        "root": hashlib.sha256(b"kvq prefix file root" + prompt.root).hexdigest(),
        "length": length,  # tokens
        "tokens": hashlib.sha256(prompt.data[: length * TOKEN_BYTES]).hexdigest(),
        "starts": starts,  # by layer group, index of the first saved block
        "blocks": digests,  # by layer group, xxh3-128 of its blocks' bytes
    }


def _blocks(cache: KVCache, group: int, start: int, held: list[BlockId]) -> Tensor:  # D77
    """Return the blocks' bytes, uint8 [blocks, block_bytes], with unwritten slots zeroed, so that no data of
    another request gets into a file. A window of one token keeps no token of a prefix.
    """
    found = [cache.read_block(group, block) for block in held]
    width, first = cache.layout.groups[group].block_bytes, cache.layout.written_from(group)
    blocks = torch.stack(found) if found else torch.empty(0, width, dtype=torch.uint8)
    unwritten = len(held) if first is None else max(0, first // cache.layout.block_size - start)
    blocks[:unwritten] = 0
    return blocks


def _digest(cache: KVCache, group: int, start: int, blocks: Tensor) -> str:
    context = digest_context(cache.layout.groups[group], cache.layout.recipe)
    return block_digest(blocks, start, context).hex()


def _name(group: int) -> str:
    return f"group.{group}"


def _check_pair(cache: KVCache, manager: BlockManager) -> None:
    """Raise ConfigError unless manager and cache match, have an identity and have no pending orders."""
    counts = [pool.num_blocks for pool in manager.pools]
    if manager.block_size != cache.layout.block_size or counts != cache.num_blocks:
        raise ConfigError(
            f"the block manager has {counts} blocks of {manager.block_size} tokens, the cache "
            f"{cache.num_blocks} of {cache.layout.block_size}; use the pair that belongs together"
        )
    anonymous = PrefixIndex(block_size=1, num_groups=1, identity=b"")
    if manager.prompt([]).root == anonymous.root_digest(""):
        raise ConfigError(
            "prefix files need a block manager that knows its model, and this one has no identity; make "
            "it with identity = model digest + recipe digest"
        )
    if manager.blocks.orders:
        raise ConfigError(
            f"{len(manager.blocks.orders)} orders wait to be carried out, so blocks may not hold their "
            f"bytes yet; call cache.carry_out(manager.take_orders()) first"
        )
