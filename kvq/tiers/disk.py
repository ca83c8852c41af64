"""Disk tier: blocks in the segments of a folder, written and read by threads while steps run.

The index is in memory and rebuilt from the segments. Anything that can't be read, is damaged or was deleted
is a miss. If writing fails, for example because the disk is full, it is tried again after a minute. Once a
second, the writer's thread looks for what other engines changed. It alone adds and removes segments.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from kvq.errors import DamagedData
from kvq.tiers.folder import Folder, is_written, step_back
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
_REFRESH_S, _MOST_REFRESH_S = 1.0, 30.0  # from look to look
_REFRESH_SHARE = 1e-4  # of time, within these limits
_MOST_AGED = 100_000  # names that are remembered
Block = tuple[str, bytes, int]  # owner, name, layer group


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    end: int = HEADER_BYTES  # of the last record
    size: int = 0  # when it was read last
    begun_s: float = 0.0
    names: dict[bytes, Record] = field(default_factory=dict)  # `written_s`: last use here; the latest is last


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
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._segments: dict[Path, _Segment] = {}
        self._unusable: set[Path] = set()
        self._where: dict[bytes, _Segment] = {}  # by name
        self._quota: Quota[bytes] = Quota(int(tenant_share * folder.budget))
        self._aged: set[bytes] = set()  # names of blocks that became too old
        # By name: block, content, its form, time of its last use.
        self._queued: dict[bytes, tuple[Block, Any, tuple[int, int], float]] = {}
        self._queued_bytes = 0
        self._written: list[Record] = []  # in this engine's segment
        self._open: tuple[_Segment, int] | None = None  # this engine's segment and its file
        self._failed_s = 0.0  # when writing failed
        self._reader = ThreadPoolExecutor(1, "kvq-disk-reader", initializer=step_back)
        self._writer = ThreadPoolExecutor(1, "kvq-disk-writer", initializer=step_back)
        self._refresh()
        watch = (weakref.ref(self), self._closing)
        threading.Thread(target=_keep_looking, args=watch, name="kvq-disk-watch", daemon=True).start()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in the folder that this engine can find."""
        return self._quota.nbytes

    def __len__(self) -> int:
        return len(self._where) + len(self._queued)

    def find(self, name: bytes) -> tuple[int, int] | None:
        """Return the form of a block that is stored or about to be, or None."""
        with self._lock:
            if (queued := self._queued.get(name)) is not None:
                return None if self._folder.is_old(queued[3]) else queued[2]
            segment = self._where.get(name)
            record = None if segment is None else segment.names[name]
            return None if record is None or self._folder.is_old(record.written_s) else record.form

    def holds(self, name: bytes) -> bool:
        """Return True if a block is stored or about to be."""
        return name in self._queued or self.find(name) is not None

    def has_aged(self, name: bytes) -> bool:
        """Return True if a block that is not found became too old, as far as is remembered."""
        return name in self._aged or name in self._where

    def write(self, block: Block, content: Any, form: tuple[int, int] = (0, 0), idle_s: float = 0) -> None:
        """Queue a block (any buffer), last used `idle_s` ago, unless it is stored or the queue is full."""
        name = block[1]
        nbytes = memoryview(content).nbytes
        with self._lock:
            if self.holds(name):
                return
            if self._queued_bytes + nbytes > _QUEUED_BYTES or not self._may_write():
                self.counts.dropped += 1
                return
            self._queued[name] = block, content, form, self._clock() - idle_s
            self._queued_bytes += nbytes
        self._writer.submit(self._write, name)

    def read(self, blocks: list[Block]) -> "Future[list[tuple[Any, tuple[int, int]] | None]]":
        """Read blocks. The result has their bytes, as buffers, and forms, or None for each that is lost."""
        return self._reader.submit(lambda: [self._read(*block) for block in blocks])

    def refresh(self) -> float:
        """Look for what has changed or is too old. Wait, and return the seconds until the next look."""
        return self._writer.submit(self._refresh).result()

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
        if self._closing.is_set():
            return
        self._closing.set()
        self._reader.shutdown(cancel_futures=True)
        self._writer.submit(self._complete)
        self._writer.shutdown()

    def _may_write(self) -> bool:
        return not self._failed_s or self._clock() - self._failed_s >= _RETRY_S

    def _read(self, owner: str, name: bytes, group: int) -> tuple[Any, tuple[int, int]] | None:
        with self._lock:
            if (queued := self._queued.get(name)) is not None:
                return queued[1:3]
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
                    with self._lock:
                        if segment.names.pop(name, None) is not None:
                            segment.names[name] = replace(record, written_s=self._clock())
                    return content, record.form
        _log.warning("a block in %s is damaged; its tokens are computed again", segment.path.name)
        self.counts.damaged += 1
        self._lose(segment, name)
        return None

    def _write(self, name: bytes) -> None:
        block, content, form, used_s = self._queued[name]
        try:
            if not self._may_write() or self._folder.is_old(used_s):
                self.counts.dropped += 1
                return
            self._append(block, self.sealing.close(block[0], name + bytes(form), content), form, used_s)
        except OSError as error:
            _log.warning("can't write KV to %s: %s", self._folder.path, error.strerror or error)
            self._failed_s = self._clock()
            self.counts.dropped += 1
            self._give_up_segment()
        finally:
            with self._lock:
                del self._queued[name]
                self._queued_bytes -= memoryview(content).nbytes

    def _append(self, block: Block, stored: Any, form: tuple[int, int], used_s: float) -> None:
        """Append a block to this engine's segment, or to a new one."""
        owner, name, group = block
        nbytes = memoryview(stored).nbytes
        sealing = self.sealing
        record = Record(
            *(name, group, sealing.owner_tag(owner), used_s, nbytes),
            *(content_digest(name + bytes(form), group, stored), sealing.is_encrypted, form),
        )
        tail_bytes = (len(self._written) + 2) * RECORD_BYTES
        self._look_after_own()
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
        self._refresh()  # others may have been deleted
        path, file = made
        segment = self._segments[path] = _Segment(path, begun_s=self._clock())
        self._open, self._written = (segment, file), []
        _write_all(file, [file_header(self._facts)], 0)
        return True

    def _complete(self) -> None:
        """Write the end of this engine's segment and close it."""
        if self._open is None:
            return
        segment, file = self._open
        self._open = None
        try:
            _write_all(file, [tail(self._written)], segment.end)
            used_s = max((one.written_s for one in list(segment.names.values())), default=segment.begun_s)
            os.utime(file, (used_s, used_s))
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

    def _look_after_own(self) -> None:
        """End this engine's segment if it was deleted, or is so old that later blocks go to another one."""
        if self._open is None:
            return
        segment, file = self._open
        if not os.fstat(file).st_nlink:
            self._open = None
            os.close(file)
            self._forget(segment)
        elif self._clock() - segment.begun_s > self._folder.fill_s:
            self._complete()

    def _refresh(self) -> float:
        """Index new blocks of all engines, and forget and delete what is too old."""
        began = time.perf_counter()
        self._look_after_own()
        found, is_old = self._folder.segments(), self._folder.is_old
        if not found or any(is_old(stat.st_mtime) for stat in found.values()):
            self._folder.tidy()
        for path, stat in found.items():
            segment = self._segments.get(path)
            if segment is None:
                if is_old(stat.st_mtime) or path in self._unusable or not self._is_usable(path):
                    continue
                segment = self._segments[path] = _Segment(path)
            self._expire(segment)
            is_own = self._open is not None and self._open[0] is segment
            if is_old(stat.st_mtime) and not is_own:
                self._forget(segment)
            elif stat.st_size != segment.size and not is_own:
                segment.size = stat.st_size
                self._scan(segment)
        for path in self._segments.keys() - found.keys():
            self._forget(self._segments[path])
        return min(max(_REFRESH_S, (time.perf_counter() - began) / _REFRESH_SHARE), _MOST_REFRESH_S)

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
            known, is_old = self._where.get(record.name), self._folder.is_old
            if is_old(record.written_s) or (known and not is_old(known.names[record.name].written_s)):
                return
            self._remove([record.name])
            self._aged.discard(record.name)
            segment.names[record.name] = record
            self._where[record.name] = segment
            self._remove(self._quota.add(record.owner, record.name, record.nbytes))

    def _forget(self, segment: _Segment) -> None:
        with self._lock:
            self._segments.pop(segment.path, None)
            self._remove(list(segment.names))

    def _expire(self, segment: _Segment) -> None:
        """Forget a segment's blocks that were not used for too long."""
        with self._lock:
            old = takewhile(lambda one: self._folder.is_old(one.written_s), segment.names.values())
            names = [one.name for one in old]
            if len(self._aged) + len(names) > _MOST_AGED:
                self._aged.clear()
            self._aged.update(names)
            self._remove(names)

    def _lose(self, segment: _Segment, name: bytes) -> None:
        with self._lock:
            if name in segment.names:
                self._remove([name])

    def _remove(self, names: Iterable[bytes]) -> None:
        """Remove blocks from the index. The lock is held."""
        for name in names:
            if (segment := self._where.pop(name, None)) is not None:
                self._quota.remove(segment.names.pop(name).owner, name)


def _keep_looking(tier: "weakref.ref[DiskTier]", closing: threading.Event) -> None:
    """Refresh a tier once a second, or less often, until it is closed or nobody has it any more."""
    pause_s = _REFRESH_S
    while not closing.wait(pause_s) and (found := tier()) is not None:
        with suppress(RuntimeError):  # it is being closed, or the process ends
            pause_s = found.refresh()
        del found


def _write_all(file: int, parts: list[Any], offset: int) -> None:
    """Write buffers one after another at an offset."""
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            done = os.pwrite(file, left, offset)
            left, offset = left[done:], offset + done
