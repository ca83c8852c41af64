"""Folder of segments: finds and deletes the segments of all engines that share it, within one budget.

An engine holds a lock on the segment that it writes. Segments are deleted whole, the least recently used
first; reading a block marks its segment as used. Only an engine that holds the folder's lock creates or
deletes segments, so that several engines together stay within the budget.
"""

import fcntl
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvq.errors import ConfigError
from kvq.fileio import PRIVATE
from kvq.sizes import binary
from kvq.tiers.segment import SUFFIX

_MOST_BYTES, _LEAST_BYTES = 256 << 20, 1 << 20  # of a segment
_PER_BUDGET = 32  # segments
_BLOCKS = 4  # least number in a segment
_TOUCH_S = 10.0  # a segment is marked as used at most this often
_PER_AGE = 8  # segments that an engine begins, and times that it marks one, within the age, at least
_NICENESS = 10  # of threads that read and write
_NEW, _NEW_S = ".new", 60.0  # suffix of segments that are not locked yet; seconds until they never will be


def least_segment(budget: int, block_bytes: int) -> int:
    """Return the least size of a segment for blocks of up to `block_bytes`.

    Raises:
        ConfigError: the budget is less than two segments.
    """
    least = max(_LEAST_BYTES, _BLOCKS * block_bytes)
    if budget < 2 * least:
        raise ConfigError(
            f"kv_disk (--kv-disk) must be at least {binary(2 * least)} for blocks of "
            f"{binary(block_bytes)}, got {binary(budget)}"
        )
    return least


class Folder:  # D400
    """Segments in one folder."""

    def __init__(
        self,
        path: Path,
        budget: int,
        block_bytes: int = 0,
        *,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the folder if it doesn't exist. An existing folder may be read-only.

        `budget`: bytes of all segments together. `block_bytes`: size of the largest block. `max_age_s`: time
        since the last use after which a segment is deleted.

        Raises:
            ConfigError: the folder can't be created or read, or the budget is less than two segments.
        """
        self.path, self.budget, self.clock, self._max_age_s = path, budget, clock, max_age_s
        self.fill_s = math.inf if max_age_s is None else max_age_s / _PER_AGE  # then a segment is completed
        least = least_segment(budget, block_bytes)
        self.segment_bytes = max(least, min(_MOST_BYTES, budget // _PER_BUDGET))
        self._touched: dict[Path, float] = {}
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(path)
        except OSError as error:
            raise ConfigError(
                f"can't keep KV in {path}: {error.strerror or error}; name a folder as kv_dir (--kv-dir) "
                f"that can be read and written"
            ) from error
        self.tidy()

    def segments(self, suffix: str = SUFFIX) -> dict[Path, os.stat_result]:
        """Return all segments with their sizes and times of use, the least recently used first."""
        found = {}
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(OSError):  # it was deleted meanwhile
                    if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False):
                        found[Path(entry.path)] = entry.stat(follow_symlinks=False)
        return dict(sorted(found.items(), key=lambda item: (item[1].st_mtime, item[0].name)))

    def is_old(self, used_s: float) -> bool:
        """Return True if a segment or block has not been used for too long."""
        return self._max_age_s is not None and self.clock() - used_s > self._max_age_s

    def tidy(self) -> None:
        """Delete old segments, and what killed engines left of new ones, if the folder can be written."""
        with suppress(OSError), self._locked():
            for path, stat in (self.segments() | self.segments(_NEW)).items():
                is_left = path.suffix == _NEW and self.clock() - stat.st_mtime > _NEW_S
                if (is_left or self.is_old(stat.st_mtime)) and not is_written(path):
                    path.unlink(missing_ok=True)

    def touch(self, path: Path) -> None:
        """Mark a segment as used now."""
        now = self.clock()
        if now - self._touched.get(path, 0.0) >= min(_TOUCH_S, self.fill_s):
            self._touched[path] = now
            with suppress(OSError):
                os.utime(path, (now, now))

    def create(self) -> tuple[Path, int] | None:
        """Create and lock a new segment, for writing and reading. Return None if the budget has no room.

        Old segments, and as many others as necessary, are deleted.

        Raises:
            OSError: the folder can't be written.
        """
        with self._locked():
            if not self._make_room():
                return None
            path = self.path / f"{int(self.clock() * 1e3):013x}-{secrets.token_hex(6)}{SUFFIX}"
            new = path.with_suffix(_NEW)  # under its name, others see it locked from the start
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
            fcntl.flock(file, fcntl.LOCK_EX)
            new.rename(path)
            return path, file

    def _make_room(self) -> bool:
        """Delete segments until one more fits into the budget. Segments that are written count as full."""
        total, removable = 0, []
        for path, stat in self.segments().items():
            is_open = is_written(path)
            total += max(stat.st_size, self.segment_bytes) if is_open else stat.st_size
            if not is_open:
                removable.append((path, stat))
        for path, stat in removable:
            if self.is_old(stat.st_mtime) or total + self.segment_bytes > self.budget:
                path.unlink(missing_ok=True)
                total -= stat.st_size
        return total + self.segment_bytes <= self.budget

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def is_written(path: Path) -> bool:
    """Return True if an engine is writing a segment."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def step_back() -> None:  # D409
    """Let this thread, which reads or writes files, run behind the engine's steps."""
    if sys.platform == "linux":  # where each thread has its own niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
