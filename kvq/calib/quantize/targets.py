"""Quantization targets: the Linear layers to quantize, and reasons for keeping other layers unquantized."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from kvq.calib.quantize.walk import decoder_layers
from kvq.errors import ConfigError, ModelError
from kvq.formats.weights import WeightFormat
from kvq.weights import ROUTERS, unstack_experts
from kvq.weights.linear import linear_at

_SIZES = (1024, 512, 256, 128, 64, 32, 16, 8)
_SHOWN = 8
_STACKED = "not a Linear layer: the weights of all experts in one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Linear layers of a model to quantize, and those to keep unquantized."""

    model: Any
    prefix: str  # name of the list of decoder layers, such as model.layers
    layers: tuple[tuple[str, ...], ...]  # per decoder layer, its Linear layers by their names inside it
    ignored: dict[str, str]  # module or parameter -> why it is kept
    stored: dict[str, str]  # experts' Linear layers -> their names in the checkpoint

    def layer(self, index: int) -> nn.Module:
        """Return a decoder layer."""
        layer: nn.Module = self.model.get_submodule(f"{self.prefix}.{index}")
        return layer

    def full_name(self, index: int, name: str) -> str:
        """Return a layer's checkpoint name, which differs from its name in the model only for experts."""
        full = f"{self.prefix}.{index}.{name}"
        return self.stored.get(full, full)

    @property
    def has_experts(self) -> bool:
        """True if the model has experts."""
        return bool(self.stored) or _STACKED in self.ignored.values()


def find_targets(model: Any, fmt: WeightFormat, held: set[str], *, takes_experts: bool) -> Targets:
    """Choose the Linear layers of the decoder layers; `held`: names of the checkpoint's tensors.

    `takes_experts`: also unstack and choose stacked experts that the checkpoint stores one by one.

    Raises:
        ModelError: the decoder layers have no Linear layers.
        ConfigError: the format's groups don't divide some layer's inputs.
    """
    stored = unstack_experts(model, held) if takes_experts else {}
    prefix, layers = decoder_layers(model)
    ignored = {
        name: "outside the decoder layers"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(f"{prefix}.")
    }
    chosen = []
    for index, layer in enumerate(layers):
        own = []
        for name, module in layer.named_modules():
            full = f"{prefix}.{index}.{name}"
            if not isinstance(module, nn.Linear):
                continue
            if name.rpartition(".")[2] in ROUTERS:
                ignored[full] = "a router"
            elif f"{stored.get(full, full)}.weight" not in held:
                ignored[full] = "the checkpoint stores it in another form"
            else:
                own.append(name)
        ignored |= {
            f"{prefix}.{index}.{name}": _STACKED
            for name, parameter in layer.named_parameters()
            if parameter.ndim == 3
        }
        chosen.append(tuple(own))
    routers = (name.removesuffix(".weight") for name in sorted(held) if name.startswith(f"{prefix}."))
    ignored |= {name: "a router" for name in routers if name.rpartition(".")[2] in ROUTERS}
    if not any(chosen):
        raise ModelError(
            f"{model.config.model_type} has no Linear layers in its decoder layers (GPT-2 has Conv1D): "
            f"kvq can't quantize its weights; --kv quantizes its KV cache"
        )
    targets = Targets(model=model, prefix=prefix, layers=tuple(chosen), ignored=ignored, stored=stored)
    _check_groups(targets, fmt)
    return targets


def _check_groups(targets: Targets, fmt: WeightFormat) -> None:
    if fmt.group_size is None:
        return
    inputs = {
        targets.full_name(index, name): linear_at(targets.layer(index), name).in_features
        for index, names in enumerate(targets.layers)
        for name in names
    }
    bad = [f"{name} ({count})" for name, count in inputs.items() if count % fmt.group_size]
    if not bad:
        return
    fits = [size for size in _SIZES if not any(count % size for count in inputs.values())]
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    raise ConfigError(
        f"groups of {fmt.group_size} don't divide the inputs of {', '.join(bad[:_SHOWN])}{more}; "
        f"--group-size {', '.join(map(str, [*fits[:4], -1]))} fit all layers (-1: one scale a row)"
    )
