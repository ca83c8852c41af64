"""Devices and dtypes, looked up by the names that users pass."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from kvq.errors import ConfigError, first_lines, unknown

_DEVICES = re.compile(r"cpu|mps|cuda(:\d{1,3})?")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str) -> torch.device:
    """Return the torch device for a name, with an index for GPUs; `auto` is the current GPU, else the CPU.

    Raises:
        ConfigError: this machine has no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not _DEVICES.fullmatch(device):
        raise ConfigError(f"unknown device {device!r}; use auto, cpu, mps, cuda or cuda:N")
    try:
        chosen = torch.empty(1, device=device, dtype=torch.float32).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {device!r} is not usable here ({first_lines(error)}); use auto, cpu or cuda"
        ) from error
    return chosen


def pick_dtype(dtype: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:  # D213
    """Return a model's computation dtype: the named one or, for `auto`, fp32 on a CPU, else its config's.

    Raises:
        ConfigError: the dtype is unknown.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else stored_dtype(config)
    if dtype not in DTYPES:
        raise ConfigError(unknown("dtype", dtype, ["auto", *DTYPES]))
    return DTYPES[dtype]


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a config.json names for unquantized tensors, or bf16 if it names none."""
    name = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    return _STORED.get(name, torch.bfloat16)
