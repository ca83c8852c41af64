"""Transfers between the host and the device, in which neither side waits for the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.kernels.uploads import ring, send, upload, upload_all

__all__ = ["Readback", "readbacks", "send", "upload", "upload_all"]

_LEAST_ROOM = 1 << 16  # bytes
_ROOMS = 8  # of the minimum size: a step reads two or three times, and two steps are in flight


@dataclass(frozen=True, slots=True)
class _Room:
    """Pinned memory for one copy, and the event recorded after the copy."""

    host: Tensor  # uint8 [bytes]
    copied: torch.cuda.Event


def readbacks(device: torch.device) -> "Callable[[Tensor], Readback]":
    """Return a function that begins to copy a tensor to the host.

    On a GPU, pinned memory is allocated in advance, since pinning is slow.
    """
    rooms: dict[int, list[_Room]] = {}  # free ones, by size in bytes
    if device.type == "cuda":
        ring(device)
        rooms[_LEAST_ROOM] = [_new_room(_LEAST_ROOM) for _ in range(_ROOMS)]

    def begin(values: Tensor) -> Readback:
        if values.device.type != "cuda":
            return Readback(values, None, [])
        size = max(_LEAST_ROOM, 1 << (values.nbytes - 1).bit_length())
        free = rooms.setdefault(size, [])
        room = free.pop() if free else _new_room(size)
        host = room.host[: values.nbytes].view(values.dtype).view(values.shape)
        host.copy_(values, non_blocking=True)
        room.copied.record(torch.cuda.current_stream(values.device))
        return Readback(host, room, free)

    return begin


class Readback:
    """Pending copy of a tensor to the host; on a CPU, the tensor itself.

    Work launched before `wait` runs during the copy.
    """

    def __init__(self, host: Tensor, room: _Room | None, free: list[_Room]) -> None:
        """`free`: the free list to which `room` is returned."""
        self._host, self._room, self._free = host, room, free
        self._values: Any = None

    def wait(self) -> Any:
        """Return the values as (nested) lists."""
        if self._values is None:
            if self._room is not None:
                self._room.copied.synchronize()
            self._values = self._host.tolist()
            if self._room is not None:
                self._free.append(self._room)
            del self._host, self._room
        return self._values


@torch.inference_mode(False)  # otherwise, only steps in inference mode could write it
def _new_room(size: int) -> _Room:
    return _Room(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
