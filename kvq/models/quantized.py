"""Models whose Linear layers are quantized: rounded while they are loaded, or read from their codes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
            continue
        own = _HEAD if module is head and fmt.code.is_integer else fmt
        weight = round_weight(module.weight.detach().float(), own)
        replace_linear(model, name, QuantizedLinear(weight, module.bias, device, backend=backend))
    return model if dtype == "auto" else model.to(dtype)
