"""Values on their way between the host and the device, for which neither waits."""

from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A list or array of numbers as a tensor on the device; through pinned memory, or it would wait."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Readback:
    """A copy of a tensor to the host that begins now and is waited for later.

    What is launched in between runs on; on a CPU the values are there at once.
    """

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            self._host = host
        else:
            self._values = values.tolist()

    def wait(self) -> Any:
        """The values as (nested) lists."""
        if self._copied is not None:
            self._copied.synchronize()
            self._values, self._copied = self._host.tolist(), None
        return self._values
