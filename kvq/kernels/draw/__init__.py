"""Draw each row's token from what temperature, min-p, top-k and top-p leave of its logits."""

from collections.abc import Callable
from typing import Any

import torch

from kvq.kernels.gpu import support as gpu
from kvq.kernels.spec import Device


def kernel_for(device: torch.device) -> Callable[..., Any] | None:
    """`draw` of `triton.py` if it runs on that device; None where the reference does the work."""
    return gpu.lazy("draw.triton", "draw") if gpu.supports_linear(None, Device.of(device)).yes else None
