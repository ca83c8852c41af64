"""Unstacked experts: separate Linear layers for each expert, as in quantized checkpoints."""

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from kvq.kernels.experts.reference import Gating, gated_experts
from kvq.weights.experts import ExpertsForm, stacked_experts
from kvq.weights.linear import linear_of, replace_linear

_NAME = re.compile(r"(.*\.\d+)\.(?:.*\.)?experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)")
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


class _Expert(nn.Module):
    """One expert, whose Linear layers use its part of the stacked weights."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (linear_of(half) for half in gate_up.chunk(2))
        self.down_proj = linear_of(down)


class UnstackedExperts(nn.Module):  # D182: GPTQ per expert; a fold's proof misses some
    """Replacement of a stacked-experts module that has a Linear layer for each weight."""

    def __init__(self, stacked: Any, gating: Gating) -> None:
        super().__init__()
        self._gating = gating
        self._experts: list[Any] = []
        for i in range(len(stacked.down_proj)):
            expert = _Expert(stacked.gate_up_proj.detach()[i], stacked.down_proj.detach()[i])
            self.add_module(str(i), expert)
            self._experts.append(expert)

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Map [rows, hidden] to [rows, hidden], using each row's experts [rows, top] and their weights."""
        out = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self._experts):
            rows, top = torch.where(chosen == i)
            if len(rows):
                x = hidden_states[rows]
                both = torch.cat((expert.gate_proj(x), expert.up_proj(x)), 1)
                given = expert.down_proj(gated_experts(both, self._gating).to(x.dtype))
                out.index_add_(0, rows, given * weights[rows, top, None].to(x.dtype))
        return out

    def shared_inputs(self) -> list[tuple[str, ...]]:
        """Return groups of Linear layers that share their input, as names inside this module."""
        count = range(len(self._experts))
        return [names for i in count for names in ((f"{i}.gate_proj", f"{i}.up_proj"), (f"{i}.down_proj",))]


def unstack_experts(model: nn.Module, held: Collection[str]) -> dict[str, str]:
    """Unstack experts whose weights a checkpoint stores one by one, as vLLM expects for quantized experts.

    `held`: names of the checkpoint's tensors. Returns a mapping from the new Linear layers' names in the
    model to their names in the checkpoint.
    """
    stored: dict[str, str] = {}
    names = [name.removesuffix(".weight") for name in held if name.endswith(".weight")]
    places = expert_places(model, stacked_experts(model), names)
    for name, (form, own) in places.items():
        replace_linear(model, name, UnstackedExperts(model.get_submodule(name), form.gating))
        stored |= {f"{name}.{expert}.{part}": there for (expert, part), there in own.items()}
    return stored


def is_expert_code(tensor: str) -> bool:
    """Return True if a checkpoint's tensor of this name belongs to the codes of one expert."""
    layer, _, kind = tensor.rpartition(".")
    return kind in ("weight_scale", "qweight") and _NAME.fullmatch(layer) is not None


Places = dict[tuple[int, str], str]  # (expert, part) -> name of its weight in a checkpoint


def expert_places(
    model: nn.Module, forms: dict[str, ExpertsForm], names: Collection[str]
) -> dict[str, tuple[ExpertsForm, Places]]:
    """Return the stacked experts whose weights are all listed separately in `names`, by module name."""
    by_layer: dict[str, Places] = {}
    for name in names:
        if (found := _NAME.fullmatch(name)) is not None:
            layer, expert, part = found.groups()
            by_layer.setdefault(layer, {})[int(expert), _PARTS.get(part, part)] = name
    places = {}
    for name, form in forms.items():
        own = next((by_layer[layer] for layer in by_layer if name.startswith(f"{layer}.")), {})
        module = model.get_submodule(name)
        wanted = {(i, part) for i in range(len(module.get_parameter("down_proj"))) for part in EXPERT_PARTS}
        plain = not form.is_transposed and not form.is_interleaved and len(list(module.parameters())) == 2
        if plain and own.keys() == wanted:
            places[name] = form, own
    return places
