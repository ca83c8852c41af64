"""Host store: blocks moved out of the pools into host memory or a file, each with its digest."""

import errno
import logging
import os
import tempfile
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from kvq.cache.digests import block_digest, digest_context
from kvq.cache.memory import allocate_bytes
from kvq.errors import ConfigError, OutOfMemory
from kvq.layout import KVLayout
from kvq.sizes import binary

_log = logging.getLogger("kvq")
_ZEROS = bytes(1 << 20)


class HostStore:
    """Host slots for blocks, in host memory or in an unnamed file in a folder.

    The digests stay in memory, so any outside change to the file is detected, even if an older block that was
    valid before is put back.
    """

    def __init__(self, layout: KVLayout, host_slots: list[int], folder: str | Path | None = None) -> None:
        """Reserve space for `host_slots` blocks immediately. The list has one entry per layer group.

        `folder`: folder for a file with the blocks. The file has no name in the folder, can be opened only by
        this process's user, and is deleted when it is closed or when the process ends for any reason.

        Raises:
            ConfigError: a count is negative, or no file can be created in the folder.
            OutOfMemory: memory or disk space is insufficient; nothing is left behind.
        """
        if len(host_slots) != len(layout.groups) or min(host_slots) < 0:
            raise ConfigError(
                f"host_slots must be {len(layout.groups)} counts of at least 0, one per layer group, "
                f"got {host_slots}"
            )
        self._sizes = [group.block_bytes for group in layout.groups]
        pools = (n * size for n, size in zip(host_slots, self._sizes, strict=True))
        *self._offsets, self.nbytes = accumulate(pools, initial=0)
        self.host_slots = list(host_slots)
        self._contexts = [digest_context(group, layout.recipe) for group in layout.groups]
        self._stored: dict[tuple[int, int], bytes] = {}  # (group, slot) -> digest
        self._storage = _Memory(self.nbytes) if folder is None else _File(self.nbytes, Path(folder))

    def put(self, group: int, slot: int, content: Tensor) -> None:
        """Store a block's bytes, uint8 [block_bytes] on the host, in a slot.

        If the disk fails, a warning is logged and the slot stays empty, so that reading it is a miss.
        """
        offset = self._offset(group, slot)
        self._stored.pop((group, slot), None)
        try:
            self._storage.write(offset, content)
        except OSError as error:
            _log.warning("a swapped-out block is lost: %s", error.strerror or error)
            return
        self._stored[group, slot] = block_digest(content, slot, self._contexts[group])

    def get(self, group: int, slot: int) -> Tensor | None:
        """Return a slot's bytes, uint8 [block_bytes], or None if they differ from the stored bytes."""
        offset = self._offset(group, slot)
        expected = self._stored.get((group, slot))
        if expected is None:
            return None
        try:
            content = self._storage.read(offset, self._sizes[group])
        except OSError as error:
            _log.warning("a swapped-out block can't be read: %s", error.strerror or error)
            return None
        if block_digest(content, slot, self._contexts[group]) != expected:
            _log.warning("a swapped-out block changed outside: group %d, slot %d; a miss", group, slot)
            return None
        return content

    def close(self) -> None:
        """Release the memory or the file. Afterwards, all slots are empty."""
        self._stored.clear()
        self._storage.close()

    def _offset(self, group: int, slot: int) -> int:
        if not 0 <= slot < self.host_slots[group]:
            raise ConfigError(
                f"group {group} has {self.host_slots[group]} host slots, got slot {slot}; "
                f"give the block manager and the cache the same host_slots"
            )
        return self._offsets[group] + slot * self._sizes[group]


class _Memory:
    """Storage in host memory. Reads return views of the memory."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = allocate_bytes(nbytes, torch.device("cpu"), purpose="the host store")

    def write(self, offset: int, content: Tensor) -> None:
        self._bytes[offset : offset + content.numel()] = content

    def read(self, offset: int, nbytes: int) -> Tensor:
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        self._bytes = self._bytes.new_empty(0)


class _File:
    """Unnamed file of fixed size with reserved disk space. If the file was truncated, reads return zeros."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".kvq-swap-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"can't keep swapped blocks in {folder}: {error.strerror or error}; "
                f"name a folder that can be written to, or swap to memory"
            ) from error
        try:
            _reserve(self._file.fileno(), nbytes)
        except OSError as error:
            self._file.close()
            raise OutOfMemory(
                f"the host store needs {binary(nbytes)} in {folder}: {error.strerror or error}; "
                f"use fewer host slots or a larger disk"
            ) from error

    def write(self, offset: int, content: Tensor) -> None:
        left = memoryview(content.numpy().data)
        while left:
            done = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[done:], offset + done

    def read(self, offset: int, nbytes: int) -> Tensor:
        content = torch.zeros(nbytes, dtype=torch.uint8)
        left = memoryview(content.numpy().data)
        while left and (done := os.preadv(self._file.fileno(), [left], offset)):
            left, offset = left[done:], offset + done
        return content

    def close(self) -> None:
        self._file.close()


def _reserve(file: int, nbytes: int) -> None:
    """Reserve a file's full disk space immediately, so that no later write finds the disk full."""
    if hasattr(os, "posix_fallocate"):
        if nbytes:
            os.posix_fallocate(file, 0, nbytes)
        return
    for offset in range(0, nbytes, len(_ZEROS)):
        piece = memoryview(_ZEROS)[: nbytes - offset]
        if os.pwrite(file, piece, offset) != len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
