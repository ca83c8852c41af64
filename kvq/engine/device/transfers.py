"""Values on their way between the host and the device, for which neither waits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.kernels.uploads import ring, send, upload, upload_all

__all__ = ["Readback", "prepare_transfers", "send", "upload", "upload_all"]

_LEAST_ROOM = 1 << 16  # bytes
_ROOMS = 8  # of the least size: a step reads two or three times, and two steps are on their way


@dataclass(frozen=True, slots=True)
class _Room:
    """Pinned memory for one copy, and the event behind that."""

    host: Tensor  # uint8 [bytes]
    copied: torch.cuda.Event


_free: dict[tuple[torch.device, int], list[_Room]] = {}  # by device and bytes


def prepare_transfers(device: torch.device) -> None:
    """Pin what the transfers of a device take, which is slow and must not happen in a step."""
    if device.type == "cuda":
        ring(device)
        rooms = _free.setdefault((device, _LEAST_ROOM), [])
        rooms += [_new_room(_LEAST_ROOM) for _ in range(_ROOMS - len(rooms))]


class Readback:
    """A copy of a tensor to the host that begins now and is waited for later.

    What is launched in between runs on; on a CPU the tensor itself is read then.
    """

    def __init__(self, values: Tensor) -> None:
        self._host, self._device = values, values.device
        self._room: _Room | None = None
        self._values: Any = None
        if self._device.type == "cuda":
            self._room = _take(self._device, values.nbytes)
            self._host = self._room.host[: values.nbytes].view(values.dtype).view(values.shape)
            self._host.copy_(values, non_blocking=True)
            self._room.copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> Any:
        """The values as (nested) lists."""
        if self._values is None:
            if self._room is not None:
                self._room.copied.synchronize()
            self._values = self._host.tolist()
            if self._room is not None:
                _free[self._device, len(self._room.host)].append(self._room)
            del self._host, self._room
        return self._values


def _take(device: torch.device, nbytes: int) -> _Room:
    """A free room of that size or larger; a new one where all are in use or were never given back."""
    size = max(_LEAST_ROOM, 1 << (nbytes - 1).bit_length())
    rooms = _free.setdefault((device, size), [])
    return rooms.pop() if rooms else _new_room(size)


@torch.inference_mode(False)  # else none but steps in inference mode could write it
def _new_room(size: int) -> _Room:
    return _Room(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
