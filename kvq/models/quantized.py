"""Models whose Linear layers are quantized: rounded while they are loaded, or read from their codes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvq.errors import ConfigError
from kvq.formats.weights import WeightCode, WeightFormat
from kvq.models.modules import load_module
from kvq.weights import QuantizedLinear, replace_linear, round_weight

_HEAD = WeightFormat(code=WeightCode.INT8)  # of integer formats: logits deserve 8 bits
_ROUTERS = ("gate", "router", "shared_expert_gate")  # small, and they choose the experts


def load_rounded(
    folder: Path, dtype: torch.dtype | str, fmt: WeightFormat, device: torch.device, *, backend: str
) -> Any:
    """A folder's model, every Linear layer rounded to the nearest codes of `fmt`, the head to 8 bits.

    Raises:
        ModelError: damaged or incomplete.
        ConfigError: groups that don't divide a layer's inputs.
    """
    model = load_module(folder, "auto")  # as stored, and mapped: one layer at a time becomes codes
    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name.rpartition(".")[2] not in _ROUTERS
    }
    formats = {
        name: _HEAD if linear is head and fmt.code.is_integer else fmt for name, linear in linears.items()
    }
    _check(model, linears, formats)
    for name, own in formats.items():
        linear = linears.pop(name)
        weight = round_weight(linear.weight.detach().float(), own)
        replace_linear(model, name, QuantizedLinear(weight, linear.bias, device, backend=backend))
    return model if dtype == "auto" else model.to(dtype)


def _check(model: nn.Module, linears: dict[str, nn.Linear], formats: dict[str, WeightFormat]) -> None:
    """Raise ConfigError unless every layer's inputs can be cut into its format's groups."""
    if not formats:
        raise ConfigError(
            f"{type(model).__name__} has no Linear layers that could be rounded; use --weights auto"
        )
    for name, fmt in formats.items():
        try:
            fmt.groups(linears[name].in_features)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
