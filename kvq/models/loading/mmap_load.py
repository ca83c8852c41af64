"""Weights straight from a mapped checkpoint into the skeleton of its model, Linear layers into panels.

transformers' loader makes every tensor in the type that the model computes in, all of them before the first
is packed: of a bf16 checkpoint in fp32 twice its bytes. But of tensors without numbers it has told by then
which goes where. Where each is taken as it is stored, they are read here, one after the other.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvq.kernels import PlainWeight
from kvq.models.describe.stored import StoredTensors
from kvq.models.describe.text_part import read_tensors
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.skeleton import Skeleton
from kvq.models.parts.linear import OwnLinears

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def fill(skeleton: Skeleton, prepared: PreparedModel) -> Any:  # D214: straight from the file into panels
    """The skeleton's model with the checkpoint's numbers and kvq's own Linear layers; nothing stays mapped.

    None, and nothing changed, if transformers makes some tensor of others: of experts that it stacks, of a
    piece of one.

    Raises:
        ModelError: a tensor of a type that torch doesn't have.
    """
    model = skeleton.model
    places = [place for place in _places(model) if place[2].is_meta]
    sources = {id(tensor): skeleton.source(tensor) for _, _, tensor in places}
    names = {number: name for number, name in sources.items() if name is not None}
    if len(names) < len(sources):
        return None
    stored, own = read_tensors(prepared.folder), OwnLinears.of(model, prepared.dtype)
    weights = {
        layer: partial(_weight, stored, names[id(linear.weight)], prepared.dtype)
        for layer, linear in own.linears.items()
    }
    packed = {id(linear._parameters) for linear in own.linears.values()}
    packed |= {id(one._parameters) for embeddings in own.lookups.values() for one in embeddings.values()}
    made: dict[int, Tensor] = {}  # tied ones stay one
    for holder, name, tensor in places:
        if id(holder) in packed and name == "weight":
            continue
        if id(tensor) not in made:
            value = stored[names[id(tensor)]].to(tensor.dtype, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        holder[name] = made[id(tensor)]
    own.install(model, weights, prepared.dtype)
    return model


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """All parameters and buffers, tied ones everywhere: what holds them, under which name."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            yield from ((holder, name, tensor) for name, tensor in holder.items() if tensor is not None)


def _weight(stored: StoredTensors, name: str, dtype: torch.dtype) -> PlainWeight:
    values = stored[name]
    is_kept = dtype is torch.float32 and values.dtype in _FLOATS
    return PlainWeight.narrowest(values if is_kept else values.to(dtype))
