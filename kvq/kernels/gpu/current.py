"""The GPU that Triton launches on, and that is captured: the current one."""

from contextlib import AbstractContextManager, nullcontext

import torch

_AS_IT_IS = nullcontext()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for a while, if it isn't."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)
