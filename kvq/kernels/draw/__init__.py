"""Sampling of each row's token from its logits, after temperature, min-p, top-k and top-p."""

from collections.abc import Callable
from typing import Any

import torch

from kvq.kernels.gpu import support as gpu
from kvq.kernels.spec import Device


def kernel_for(device: torch.device) -> Callable[..., Any] | None:
    """Return `draw` of `triton.py` if it runs on the device, or None if the reference is to be used."""
    return gpu.lazy("draw.triton", "draw") if gpu.supports_linear(None, Device.of(device)).yes else None
