"""Disk tier: blocks in the segments of a folder, written and read by threads while steps run.

The index is in memory and rebuilt from the segments. Anything that can't be read, is damaged or was deleted
is a miss. If writing fails, for example because the disk is full, it is tried again after a minute.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvq.errors import DamagedData
from kvq.tiers.folder import Folder, is_written
from kvq.tiers.quota import Quota
from kvq.tiers.sealing import Sealing
from kvq.tiers.segment import (
    HEADER_BYTES,
    RECORD_BYTES,
    Record,
    content_digest,
    file_header,
    read_header,
    records,
    tail,
)

_log = logging.getLogger("kvq")
_QUEUED_BYTES = 256 << 20  # most bytes that wait to be written
_RETRY_S = 60.0
_REFRESH_S = 1.0
Block = tuple[str, bytes, int]  # owner, name, layer group


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    end: int = HEADER_BYTES  # of the last record
    size: int = 0  # when it was read last
    names: dict[bytes, Record] = field(default_factory=dict)


@dataclass(slots=True)
class _Counts:
    """Totals since the start."""

    written: int = 0  # blocks
    read: int = 0
    dropped: int = 0  # not written: the queue was full, or writing failed
    damaged: int = 0  # parts of files, or blocks, that could not be trusted


class DiskTier:
    """Blocks in files. Methods that don't say otherwise may be called from any thread and return at once."""

    def __init__(
        self,
        folder: Folder,
        sealing: Sealing,
        facts: dict[str, str],
        *,
        sizes: Callable[[int, int], int] | None = None,
        tenant_share: float = 1.0,
    ) -> None:
        """Index the blocks in the folder.

        `facts`: about the engine, for the headers of its segments. `sizes(group, rung)`: bytes that a block
        has to have.
        """
        self.counts = _Counts()
        self._folder, self.sealing, self._facts, self._clock = folder, sealing, facts, folder.clock
        self._sizes = sizes
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._segments: dict[Path, _Segment] = {}
        self._unusable: set[Path] = set()
        self._where: dict[bytes, _Segment] = {}  # by name
        self._quota: Quota[bytes] = Quota(int(tenant_share * folder.budget))
        self._queued: dict[bytes, tuple[Block, Any, tuple[int, int]]] = {}  # by name: content and its form
        self._queued_bytes = 0
        self._written: list[Record] = []  # in this engine's segment
        self._open: tuple[_Segment, int] | None = None  # this engine's segment and its file
        self._failed_s = 0.0  # when writing failed
        self._refreshed_s = 0.0
        self._is_closed = False
        self._reader = ThreadPoolExecutor(1, "kvq-disk-reader")
        self._writer = ThreadPoolExecutor(1, "kvq-disk-writer")
        self._refresh()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in the folder that this engine can find."""
        return self._quota.nbytes

    def __len__(self) -> int:
        return len(self._where) + len(self._queued)

    def find(self, name: bytes) -> tuple[int, int] | None:
        """Return the form of a block that is stored or about to be, or None."""
        if (queued := self._queued.get(name)) is not None:
            return queued[2]
        segment = self._where.get(name)
        record = None if segment is None else segment.names.get(name)
        return None if record is None else record.form

    def holds(self, name: bytes) -> bool:
        """Return True if a block is stored or about to be."""
        return name in self._where or name in self._queued

    def write(self, block: Block, content: Any, form: tuple[int, int] = (0, 0)) -> None:
        """Queue a block for writing, unless it is stored or the queue is full. `content`: any buffer."""
        name = block[1]
        nbytes = memoryview(content).nbytes
        with self._lock:
            if self.holds(name):
                return
            if self._queued_bytes + nbytes > _QUEUED_BYTES or not self._may_write():
                self.counts.dropped += 1
                return
            self._queued[name] = block, content, form
            self._queued_bytes += nbytes
        self._writer.submit(self._write, name)

    def read(self, blocks: list[Block]) -> "Future[list[tuple[Any, tuple[int, int]] | None]]":
        """Read blocks. The result has their bytes, as buffers, and forms, or None for each that is lost."""
        return self._reader.submit(lambda: [self._read(*block) for block in blocks])

    def refresh(self) -> None:
        """Look for changes by other engines soon, if the last look is a second ago."""
        now = time.monotonic()
        if now - self._refreshed_s >= _REFRESH_S:
            self._refreshed_s = now
            self._reader.submit(self._refresh)

    @property
    def is_failing(self) -> bool:
        """True while nothing is written because writing has failed."""
        return not self._may_write()

    @property
    def has_room(self) -> bool:
        """True while the queue for writing is not half full."""
        return self._queued_bytes < _QUEUED_BYTES // 2 and self._may_write()

    def close(self) -> None:
        """Write what is queued, and complete this engine's segment. Waits. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.shutdown(cancel_futures=True)
        self._writer.submit(self._complete)
        self._writer.shutdown()

    def _may_write(self) -> bool:
        return not self._failed_s or self._clock() - self._failed_s >= _RETRY_S

    def _read(self, owner: str, name: bytes, group: int) -> tuple[Any, tuple[int, int]] | None:
        with self._lock:
            if (queued := self._queued.get(name)) is not None:
                return queued[1:]
            segment = self._where.get(name)
            record = None if segment is None else segment.names.get(name)
        if segment is None or record is None:
            return None
        try:
            with open(segment.path, "rb", buffering=0) as file:
                stored = os.pread(file.fileno(), record.nbytes, record.offset)
        except OSError:  # deleted, by age or for room
            self._lose(segment, name)
            return None
        label = name + bytes(record.form)  # the form is bound to the block, too
        if content_digest(label, group, stored) == record.digest:
            with suppress(DamagedData):
                content = self.sealing.open(owner, label, stored)
                if self._sizes is None or memoryview(content).nbytes == self._sizes(group, record.form[0]):
                    self.counts.read += 1
                    self._folder.touch(segment.path)
                    return content, record.form
        _log.warning("a block in %s is damaged; its tokens are computed again", segment.path.name)
        self.counts.damaged += 1
        self._lose(segment, name)
        return None

    def _write(self, name: bytes) -> None:
        block, content, form = self._queued[name]
        try:
            if not self._may_write():
                self.counts.dropped += 1
                return
            self._append(block, self.sealing.close(block[0], name + bytes(form), content), form)
        except OSError as error:
            _log.warning("can't write KV to %s: %s", self._folder.path, error.strerror or error)
            self._failed_s = self._clock()
            self.counts.dropped += 1
            self._give_up_segment()
        finally:
            with self._lock:
                del self._queued[name]
                self._queued_bytes -= memoryview(content).nbytes

    def _append(self, block: Block, stored: Any, form: tuple[int, int]) -> None:
        """Append a block to this engine's segment, or to a new one."""
        owner, name, group = block
        nbytes = memoryview(stored).nbytes
        sealing, written_s = self.sealing, self._clock()
        record = Record(
            *(name, group, sealing.owner_tag(owner), written_s, nbytes),
            *(content_digest(name + bytes(form), group, stored), sealing.is_encrypted, form),
        )
        tail_bytes = (len(self._written) + 2) * RECORD_BYTES
        if self._open is not None:
            segment, file = self._open
            if segment.end + RECORD_BYTES + nbytes + tail_bytes > self._folder.segment_bytes:
                self._complete()
        if self._open is None and not self._begin():
            self.counts.dropped += 1
            return
        assert self._open is not None, "just begun"
        segment, file = self._open
        _write_all(file, [record.pack(), stored], segment.end)
        record = replace(record, offset=segment.end + RECORD_BYTES)
        self._written.append(record)
        self._add(segment, record)
        self.counts.written += 1

    def _begin(self) -> bool:
        """Begin a new segment. Return False if the budget has no room for one."""
        made = self._folder.create()
        if made is None:
            return False
        path, file = made
        segment = _Segment(path)
        self._open, self._written = (segment, file), []
        _write_all(file, [file_header(self._facts)], 0)
        with self._lock:
            self._segments[path] = segment
        self._refresh()  # others may have been deleted
        return True

    def _complete(self) -> None:
        """Write the end of this engine's segment and close it."""
        if self._open is None:
            return
        segment, file = self._open
        self._open = None
        try:
            _write_all(file, [tail(self._written)], segment.end)
        except OSError as error:
            _log.warning("can't complete %s: %s", segment.path, error.strerror or error)
        finally:
            os.close(file)

    def _give_up_segment(self) -> None:
        """Close this engine's segment after a failed write, without the part that was not written."""
        if self._open is not None:
            segment, file = self._open
            self._open = None
            with suppress(OSError):
                os.ftruncate(file, segment.end)
                if not self._written:
                    segment.path.unlink()
            os.close(file)

    def _refresh(self) -> None:
        """Index new blocks of all engines, and forget deleted segments and old ones."""
        with self._refreshing:
            self._compare(list(self._segments))

    def _compare(self, known: list[Path]) -> None:
        """Compare the folder with the index. `known`: segments that were indexed before."""
        found = self._folder.segments()
        for path, stat in found.items():
            segment = self._segments.get(path)
            is_old = self._folder.is_old(stat)
            if segment is None:
                segment = _Segment(path)
                if is_old or path in self._unusable or not self._is_usable(path):
                    continue
                self._segments[path] = segment
            is_own = self._open is not None and self._open[0] is segment
            if is_old and not is_own:
                self._forget(segment)
            elif stat.st_size != segment.size and not is_own:
                segment.size = stat.st_size
                self._scan(segment)
        for path in known:
            if path not in found and path in self._segments:
                self._forget(self._segments[path])

    def _is_usable(self, path: Path) -> bool:
        """Return True if a segment's header is valid. Warn once about any that is not."""
        try:
            with open(path, "rb", buffering=0) as file:
                return bool(read_header(file.fileno()))
        except DamagedData as error:
            if not is_written(path):  # otherwise, its header is still to come
                _log.warning("segment %s is not used: %s", path, error)
                self.counts.damaged += 1
                self._unusable.add(path)
        except OSError as error:
            _log.warning("segment %s can't be read: %s", path, error.strerror or error)
            self._unusable.add(path)
        return False

    def _scan(self, segment: _Segment) -> None:
        with suppress(OSError):
            for record in records(segment.path, segment.end, is_open=is_written(segment.path)):
                if record is None:
                    self.counts.damaged += 1
                else:
                    self._add(segment, record)

    def _add(self, segment: _Segment, record: Record) -> None:
        """Index a block. Blocks of an owner who has too many are forgotten, the oldest first."""
        with self._lock:
            segment.end = max(segment.end, record.end)
            if record.name in self._where:
                return
            segment.names[record.name] = record
            self._where[record.name] = segment
            for name in self._quota.add(record.owner, record.name, record.nbytes):
                self._remove(record.owner, name)

    def _forget(self, segment: _Segment) -> None:
        with self._lock:
            self._segments.pop(segment.path, None)
            self._remove_all(list(segment.names.values()))

    def _lose(self, segment: _Segment, name: bytes) -> None:
        with self._lock:
            if (record := segment.names.get(name)) is not None:
                self._remove_all([record])

    def _remove_all(self, lost: Iterable[Record]) -> None:
        for record in lost:
            self._remove(record.owner, record.name)

    def _remove(self, owner: bytes, name: bytes) -> None:
        """Remove a block from the index. The lock is held."""
        segment = self._where.pop(name, None)
        if segment is not None:
            del segment.names[name]
            self._quota.remove(owner, name)


def _write_all(file: int, parts: list[Any], offset: int) -> None:
    """Write buffers one after another at an offset."""
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            done = os.pwrite(file, left, offset)
            left, offset = left[done:], offset + done
