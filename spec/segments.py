"""Segments: the files in which blocks that left the pools are kept. Every damaged part is named."""

import struct
from collections.abc import Iterator
from pathlib import Path

from xxh3 import xxh3_64, xxh3_128

from findings import Wrong, load_json, need

SUFFIX = ".kvqseg"
_HEADER, _CHECK = 512, 8
_FILE, _END = struct.Struct("<8sI"), struct.Struct("<4sI")
# mark, layer group, encrypted, two numbers of the form, bytes, name, owner, time, digest
_RECORD = struct.Struct("<4sHBBBxI32s16sd16s")
_STEP = _RECORD.size + _CHECK


def _holds(raw: bytes, size: int) -> bool:
    """Whether fields of `size` bytes are followed by their check value."""
    return len(raw) == size + _CHECK and raw[size:] == xxh3_64(raw[:size])


def _facts(raw: bytes) -> dict:
    header = raw[:_HEADER]
    need(_holds(header, _HEADER - _CHECK), f"bytes 0..{_HEADER}: the header is damaged, or not a segment's")
    magic, size = _FILE.unpack_from(header)
    need(
        magic == b"kvqseg01" and size <= _HEADER - _CHECK - _FILE.size, "bytes 0..12: not a segment's header"
    )
    facts = load_json(header[_FILE.size : _FILE.size + size], "the header")
    need(isinstance(facts, dict) and facts.get("version") == 1, f"version: {facts!r:.80}, expected 1")
    return facts


def _end(raw: bytes) -> tuple[int, int | None]:
    """The offset behind the last block of a completed file, and the number that its end states."""
    tail = raw[-(_END.size + _CHECK) :]
    if not _holds(tail, _END.size) or not tail.startswith(b"kvqE"):
        return len(raw), None
    _, count = _END.unpack_from(tail)
    return max(_HEADER, len(raw) - len(tail) - count * _STEP), count


def _records(raw: bytes, end: int, wrong: list[str]) -> Iterator[tuple[int, bytes, tuple]]:
    """Headers of blocks with their offsets; after damage, from the next valid one on."""
    at = _HEADER
    while at < end:
        fields = raw[at : at + _STEP]
        record = _RECORD.unpack_from(fields) if _holds(fields, _RECORD.size) else None
        if record is not None and record[0] == b"kvqB" and at + _STEP + record[5] <= end:
            yield at, fields, record
            at += _STEP + record[5]
            continue
        following = raw.find(b"kvqB", at + 1, end)
        while following >= 0 and not _holds(raw[following : following + _STEP], _RECORD.size):
            following = raw.find(b"kvqB", following + 1, end)
        stop = end if following < 0 else following
        wrong.append(f"bytes {at}..{stop}: no block")
        at = stop


def check_segment(path: Path) -> str:
    """Check header, digests and counts of a segment."""
    raw = path.read_bytes()
    facts, wrong, count, nbytes, listed = _facts(raw), [], 0, 0, b""
    end, stated = _end(raw)
    for at, fields, record in _records(raw, end, wrong):
        _, group, encrypted, *form, size, name, _, _, digest = record
        where = f"bytes {at + _STEP}..{at + _STEP + size}: block {count} of layer group {group}"
        content = raw[at + _STEP : at + _STEP + size]
        hashed = name + bytes(form) + group.to_bytes(2, "little") + content
        if encrypted > 1 or len(hashed) <= 240:
            wrong.append(f"{where} can't be")
        elif xxh3_128(hashed) != digest:
            wrong.append(f"{where} is damaged")
        listed, count, nbytes = listed + fields, count + 1, nbytes + size
    if stated is not None and (stated != count or raw[end : end + len(listed)] != listed):
        wrong.append(f"bytes {end}..{len(raw)}: the end lists {stated} blocks, and {count} were found")
    if wrong:
        raise Wrong("; ".join(f"{path.name}, {what}" for what in wrong))
    state = "complete" if stated is not None else "not completed"
    return f"{path.name}: {count} blocks of {facts.get('kv', 'unknown KV')}, {nbytes} bytes, {state}"


def check_segments(folder: Path) -> list[str]:
    """Check all segments of a folder, and raise for all damaged parts together."""
    told, wrong = [], []
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        try:
            told.append(check_segment(path))
        except Wrong as error:
            wrong.append(str(error))
    if wrong:
        raise Wrong("; ".join(wrong))
    return told
