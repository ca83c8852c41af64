"""Uploads of numbers to a device without synchronization, through pinned memory that is allocated once."""

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
SEGMENTS, SEGMENT_BYTES = 8, 1 << 20
_ALIGNED = 16  # bytes that kernels read at once
_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
    torch.float64: np.float64,
    torch.float32: np.float32,
}
_TORCH = {np.dtype(kind): dtype for dtype, kind in _NUMPY.items()}


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers (a list, nested lists or an array) as a tensor on the device, without blocking."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return upload_all([np.asarray(values, _NUMPY[dtype])], device)[0]


def upload_all(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Return several arrays as device tensors, sent in a single copy, each with its own dtype and shape."""
    if device.type != "cuda":
        return [torch.tensor(array, device=device) for array in arrays]
    sizes = [_aligned(array.nbytes) for array in arrays]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    ring(device).send(arrays, whole)
    return [
        part[: array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
        for part, array in zip(whole.split(sizes), arrays, strict=True)
    ]


def send(array: Array, target: Tensor) -> None:
    """Copy an array to a contiguous tensor with the same number of bytes."""
    if target.device.type == "cuda":
        ring(target.device).send([array], target.view(torch.uint8))
    else:
        target.view(array.shape).copy_(torch.from_numpy(array))


class _Ring:  # D243: one event per segment, not per copy
    """Ring buffer of pinned memory segments.

    A segment is reused once its copies have ended on all streams. Its copies were enqueued a full cycle
    earlier, so in practice this never blocks; `waits` counts the times that it did.
    """

    def __init__(
        self, device: torch.device, *, segments: int = SEGMENTS, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        assert segment_bytes % _ALIGNED == 0, "pieces begin aligned"
        self.waits = 0
        self._device = device
        self._segments = [
            torch.empty(segment_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(segments)
        ]
        self._bytes = [segment.numpy() for segment in self._segments]
        self._copied: list[list[torch.cuda.Event]] = [[] for _ in range(segments)]
        self._streams: set[torch.cuda.Stream] = set()  # of the copies of the current segment
        self._segment = 0
        self._used = 0  # bytes of that segment
        self._lock = Lock()  # engines in several threads share a device

    def send(self, arrays: Sequence[Array], target: Tensor) -> None:
        """Copy arrays one after another, at aligned offsets, to a uint8 [bytes] tensor on the device."""
        with self._lock:
            if len(target) <= len(self._bytes[0]):
                start, at = self._room(len(target)), 0
                for array in arrays:
                    self._put(start + at, array)
                    at += _aligned(array.nbytes)
                self._copy(start, target)
            else:
                self._send_long(arrays, target)

    def _send_long(self, arrays: Sequence[Array], target: Tensor) -> None:
        """Send arrays that don't fit in one segment, piece by piece."""
        whole, at = np.zeros(len(target), np.uint8), 0
        for array in arrays:
            whole[at : at + array.nbytes] = _as_bytes(array)
            at += _aligned(array.nbytes)
        most = len(self._bytes[0])
        for first in range(0, len(whole), most):
            piece = whole[first : first + most]
            start = self._room(len(piece))
            self._put(start, piece)
            self._copy(start, target[first : first + most])

    def _room(self, nbytes: int) -> int:
        """Reserve bytes in the current segment, or in the next if it is full, and return their offset."""
        if self._used + nbytes > len(self._bytes[0]):
            self._copied[self._segment] = [_behind(stream) for stream in self._streams]
            self._streams.clear()
            self._segment, self._used = (self._segment + 1) % len(self._bytes), 0
            for copied in self._copied[self._segment]:
                if not copied.query():
                    self.waits += 1
                    copied.synchronize()
        start = self._used
        self._used += _aligned(nbytes)
        return start

    def _put(self, start: int, array: Array) -> None:
        self._bytes[self._segment][start : start + array.nbytes] = _as_bytes(array)

    def _copy(self, start: int, target: Tensor) -> None:
        host = self._segments[self._segment][start : start + len(target)]
        target.copy_(host, non_blocking=True)
        self._streams.add(torch.cuda.current_stream(self._device))


def _behind(stream: torch.cuda.Stream) -> torch.cuda.Event:
    copied = torch.cuda.Event()
    copied.record(stream)
    return copied


@lru_cache(maxsize=16)
def ring(device: torch.device) -> _Ring:
    """Return a device's ring, created at the first call, which must precede the first step and any graph."""
    return _Ring(device)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _as_bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
