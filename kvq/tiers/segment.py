"""Segments: append-only files of blocks. Each block is stored with its name, its owner and a digest.

A file begins with a sealed header and continues with records: a record header, then the block's bytes. A file
that was completed ends with all record headers once more, so that it can be opened without reading it whole.
After damage, reading continues at the next valid record header. A block's digest covers its name, so blocks
that were exchanged don't match either.
"""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kvq.errors import DamagedData

SUFFIX = ".kvqseg"
VERSION = 1
HEADER_BYTES = 512
_FILE = struct.Struct("<8sI")  # magic, bytes of JSON
_MAGIC = b"kvqseg01"
# magic, layer group, whether it is encrypted, two numbers of the form, bytes, name, owner, time, digest
_RECORD = struct.Struct("<4sHBBBxI32s16sd16s")
_CHECK_BYTES = 8
RECORD_BYTES = _RECORD.size + _CHECK_BYTES
_MARK = b"kvqB"
_END = struct.Struct("<4sI")  # magic, number of records
_END_MARK = b"kvqE"
_END_BYTES = _END.size + _CHECK_BYTES
_PIECE = 1 << 20  # bytes read at once to find the next record after damage


@dataclass(frozen=True, slots=True)
class Record:
    """Header of a stored block. Times are in seconds since 1970."""

    name: bytes  # 32 bytes
    group: int
    owner: bytes  # 16 bytes
    written_s: float
    nbytes: int  # as stored
    digest: bytes  # 16 bytes
    is_encrypted: bool
    form: tuple[int, int] = (0, 0)  # see `kvq.tiers.tiers.Form`
    offset: int = 0  # of the block's bytes in the file

    @property
    def end(self) -> int:
        """Offset of the first byte after the block."""
        return self.offset + self.nbytes

    def pack(self) -> bytes:
        """Return the header as stored, with its check value."""
        fields = _RECORD.pack(
            *(_MARK, self.group, self.is_encrypted, *self.form, self.nbytes),
            *(self.name, self.owner, self.written_s, self.digest),
        )
        return fields + _check(fields)


def content_digest(name: bytes, group: int, content: Any) -> bytes:
    """Return the digest of a block's bytes under its name: xxh3-128. `content`: any buffer."""
    hasher = xxhash.xxh3_128(name + group.to_bytes(2, "little"))
    hasher.update(content)
    return hasher.digest()


def file_header(facts: dict[str, str]) -> bytes:
    """Return a file's header, which states the version and `facts` about the engine that writes it."""
    text = json.dumps({"version": VERSION, **facts}, sort_keys=True).encode()
    fields = (_FILE.pack(_MAGIC, len(text)) + text).ljust(HEADER_BYTES - _CHECK_BYTES, b"\0")
    assert len(fields) == HEADER_BYTES - _CHECK_BYTES, "facts are short"
    return fields + _check(fields)


def read_header(file: int) -> dict[str, Any]:
    """Return the facts in a file's header.

    Raises:
        DamagedData: the file is no segment, is damaged, or has another version.
    """
    raw = os.pread(file, HEADER_BYTES, 0)
    fields = raw[:-_CHECK_BYTES]
    if len(raw) < HEADER_BYTES or raw[-_CHECK_BYTES:] != _check(fields) or not fields.startswith(_MAGIC):
        raise DamagedData("its header is damaged or not a segment's")
    facts = json.loads(fields[_FILE.size : _FILE.size + _FILE.unpack_from(fields)[1]])
    if facts.get("version") != VERSION:
        raise DamagedData(f"it has version {facts.get('version')!r}, this is version {VERSION}")
    return dict(facts)


def tail(records: list[Record]) -> bytes:
    """Return the end of a completed file: all record headers, and their number."""
    fields = _END.pack(_END_MARK, len(records))
    return b"".join(record.pack() for record in records) + fields + _check(fields)


def records(path: Path, start: int, *, is_open: bool) -> Iterator[Record | None]:
    """Yield the records from offset `start` on. None stands for a damaged part that is left out.

    `is_open`: whether an engine is still writing the file, so that it may end within a record.

    Raises:
        OSError: the file can't be read.
    """
    with open(path, "rb", buffering=0) as opened:
        file, size = opened.fileno(), os.fstat(opened.fileno()).st_size
        if start == HEADER_BYTES and (listed := _listed(file, size)) is not None:
            yield from listed
            return
        at, end = start, _tail_start(file, size)
        while at + RECORD_BYTES <= end:
            record = _parse(os.pread(file, RECORD_BYTES, at), at + RECORD_BYTES)
            if record is None:
                yield None
                at = _next_mark(file, at + 1, end)
            elif record.end > end:
                break
            else:
                yield record
                at = record.end
        if at < end and not is_open:  # its engine was killed
            yield None


def _listed(file: int, size: int) -> list[Record] | None:
    """Return the records that a completed file's end lists, or None if there is no valid end."""
    end = _tail_start(file, size)
    headers = os.pread(file, size - _END_BYTES - end, end) if end < size else b""
    found, at = [], HEADER_BYTES
    for i in range(0, len(headers), RECORD_BYTES):
        record = _parse(headers[i : i + RECORD_BYTES], at + RECORD_BYTES)
        if record is None:
            return None
        found.append(record)
        at = record.end
    return found if at == end < size else None


def _tail_start(file: int, size: int) -> int:
    """Return the offset at which the end of a completed file begins, or the file's size if it has none."""
    raw = os.pread(file, _END_BYTES, max(0, size - _END_BYTES))
    if len(raw) < _END_BYTES or raw[_END.size :] != _check(raw[: _END.size]) or not raw.startswith(_END_MARK):
        return size
    _, count = _END.unpack_from(raw)
    return max(HEADER_BYTES, size - _END_BYTES - int(count) * RECORD_BYTES)


def _parse(raw: bytes, offset: int) -> Record | None:
    fields = raw[: _RECORD.size]
    if len(raw) < RECORD_BYTES or raw[_RECORD.size :] != _check(fields):
        return None
    mark, group, encrypted, *form, nbytes, name, owner, written_s, digest = _RECORD.unpack(fields)
    if mark != _MARK:
        return None
    return Record(
        *(name, group, owner, written_s, nbytes, digest, bool(encrypted)), (form[0], form[1]), offset
    )


def _next_mark(file: int, at: int, size: int) -> int:
    """Return the offset of the next possible record header at or after `at`, or the file's size."""
    while at < size:
        piece = os.pread(file, _PIECE, at)
        if (found := piece.find(_MARK)) >= 0:
            return at + found
        at += max(1, len(piece) - len(_MARK) + 1)
    return size


def _check(fields: bytes) -> bytes:
    return xxhash.xxh3_64(fields).digest()
