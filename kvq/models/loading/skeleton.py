"""A model without its weights: transformers' own module on torch's meta device, from headers alone.

It reveals missing, unexpected and misshapen tensors in a tenth of a second, before gigabytes are read. If
possible, the skeleton is then filled from the mapped files, with packed Linear layers.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvq.errors import ModelError, first_lines
from kvq.formats.checkpoints import parse_config
from kvq.formats.checkpoints.fields import shown
from kvq.formats.ggml import GgmlType
from kvq.formats.weights import Inputs
from kvq.geometry import parse_geometry
from kvq.kernels import BlockWeight, Device, LinearSpec, PlainWeight, Weight, select
from kvq.kernels.linear.cpu import CpuLinear
from kvq.models.describe.checkpoint import config_place
from kvq.models.describe.config_values import check_shapes
from kvq.models.describe.modules import build_on_meta, load_config, load_module_from, unquantized
from kvq.models.describe.text_part import ModelTensors, read_tensors
from kvq.models.gguf.tensors import GgufTensors
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.quantized import (
    check_rounded_experts,
    coded_layers,
    is_bitsandbytes,
    plain_tensors,
    rounded_formats,
    runs_experts,
)
from kvq.models.observe.geometry import can_replace_attention
from kvq.models.observe.support import is_listed
from kvq.models.parts.linear import install_own, own_linears
from kvq.weights import EXPERT_PARTS, expert_places, install, install_experts, stacked_experts
from kvq.weights.experts import ExpertsForm
from kvq.weights.files import stored_shape
from kvq.weights.files.tensors import FLOATS
from kvq.weights.linear import PackedEmbedding, is_plain_lookup, replace_linear, scale_of
from kvq.weights.unstacked import Places

_log = logging.getLogger("kvq")
# D389: layers in blocks that round inputs to 16 bits even where 8 are chosen
_SENSITIVE = re.compile(r"\.(q|k|v|qkv)_proj\.|lm_head|embed_tokens")


class _StandIn(Tensor):
    """A tensor that has no memory, even after a loader moves it."""

    def to(  # type: ignore[override]  # torch's overloads, without those that no loader uses
        self, *_: object, dtype: torch.dtype | None = None, device: object = None, non_blocking: bool = False
    ) -> Tensor:
        if dtype in (None, self.dtype):
            return self.as_subclass(Tensor)  # shares the storage that identifies its source
        return torch.empty(self.shape, dtype=dtype, device="meta")


def build_skeleton(prepared: PreparedModel) -> tuple[Any, dict[str, Tensor]] | None:
    """Return a prepared model's module, with every parameter on the meta device, and its stand-in tensors.

    The stand-ins, keyed by their names on disk, are the tensors without memory that the module was built
    from. Returns None if transformers can't build a module without values; loading then reports any error.

    Raises:
        ModelError: tensors are missing, unexpected or misshapen, or kvq would run the model incorrectly.
        ConfigError: the weight format's groups don't divide a layer's inputs.
    """
    config = prepared.config.get("quantization_config")
    plain = load_config(prepared.folder)
    tensors = _stand_ins(prepared, config)
    check_shapes(
        prepared.folder,
        unquantized(prepared.config),
        partial(build_on_meta, prepared.folder),
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        prepared.stored_bytes,
    )
    if is_bitsandbytes(config):  # its layers are built from the values
        return None
    try:
        model: Any = load_module_from(prepared.folder, plain, tensors, prepared.dtype)
    except ModelError as error:
        if error.__cause__ is None:
            raise
        _log.debug("checked by loading only: %s", first_lines(error))
        return None
    check_runs(model, prepared)
    if prepared.rounded_to is not None:
        rounded_formats(model, prepared.rounded_to)
        if runs_experts(prepared.rounded_to, prepared.device, prepared.backend) is not None:
            check_rounded_experts(model, prepared.rounded_to)
    return model, tensors


def check_runs(model: Any, prepared: PreparedModel) -> None:
    """Raise ModelError unless a model's attention can be replaced and kvq reads the same geometry from it."""
    if not can_replace_attention(model):
        raise ModelError(f"kvq does not run {prepared.geometry.model_type}: its attention can't be replaced")
    if not is_listed(prepared.geometry):
        return  # its geometry comes from transformers' own code
    live, ours = (x.expanded() for x in (parse_geometry(model.config.to_dict()), prepared.geometry))
    if live != ours:
        name = next(
            field.name for field in fields(ours) if getattr(ours, field.name) != getattr(live, field.name)
        )
        here, there = shown(getattr(ours, name)), shown(getattr(live, name))
        raise ModelError(
            f"kvq reads {name} in {config_place(prepared.folder)} as {here}, transformers as {there}; "
            f"correct the file, or report this model: it would be run wrongly"
        )


def _stand_ins(prepared: PreparedModel, config: object) -> dict[str, Tensor]:
    """Return stand-ins, without memory, for the tensors that transformers would load, keyed by name."""
    entries = {entry.name: entry for entry in prepared.entries}
    if config is None or is_bitsandbytes(config):
        return {
            name: _stand_in(entry.shape, prepared.dtype)
            for name, entry in entries.items()
            if f"{name}.absmax" not in entries  # four bits per value, packed without their shape
        }
    scheme = parse_config(config)
    stored = read_tensors(prepared.folder)
    coded = coded_layers(stored)
    whole = {f"{name}.weight": stored_shape(scheme, name, stored) for name in coded}
    shapes = {name: entry.shape for name, entry in entries.items()}
    plain = plain_tensors(scheme, shapes, coded)
    return {name: _stand_in(shape, prepared.dtype) for name, shape in {**plain, **whole}.items()}


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(_StandIn)


def by_storage(stand_ins: Mapping[str, Tensor]) -> dict[int, tuple[str, Tensor]]:
    """Return stand-ins and their names, keyed by the id of their storage."""
    return {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in stand_ins.items()}


def source_of(tensor: Tensor, stand_ins: Mapping[int, tuple[str, Tensor]]) -> str | None:
    """Return the name of the stand-in that a model tensor uses unchanged; None if transformers computed it.

    `stand_ins`: as returned by `by_storage`.
    """
    name, whole = stand_ins.get(tensor.untyped_storage()._cdata, (None, tensor))
    return name if tensor.shape == whole.shape and tensor.stride() == whole.stride() else None


@torch.no_grad()
def fill(  # D214: straight from the file into panels
    model: Any, stand_ins: Mapping[str, Tensor], prepared: PreparedModel, *, packs: bool = True
) -> Any:
    """Fill a skeleton with the checkpoint's values; nothing stays mapped.

    `packs`: also replace Linear layers with kvq's own; without it, only those in blocks that a GPU's kernels
    multiply. Tensors are read one at a time. Returns None and changes nothing if transformers computes any
    tensor from others, such as a slice, or experts that it stacks; those of GGUF files are packed one by one.

    Raises:
        ModelError: a tensor has a dtype that torch doesn't support.
    """
    stored, known = read_tensors(prepared.folder), by_storage(stand_ins)
    experts = _experts_of(model, stored) if packs else {}
    stacked = {id(holder) for name in experts for holder, _, _ in _places(model.get_submodule(name))}
    places = [place for place in _places(model) if place[2].is_meta and id(place[0]) not in stacked]
    sources = {id(tensor): source_of(tensor, known) for _, _, tensor in places}
    names = {number: name for number, name in sources.items() if name is not None}
    if len(names) < len(sources):
        return None
    linears, lookups = own_linears(model, prepared.dtype)
    if not packs:  # a head that is the embedding stays one with it
        linears = {
            layer: linear
            for layer, linear in linears.items()
            if layer not in lookups
            and isinstance(stored, GgufTensors)
            and keeps_blocks(stored.kind(names[id(linear.weight)]), prepared)
        }
        lookups = {}
    weights = {
        layer: partial(_weight, stored, names[id(linear.weight)], prepared)
        for layer, linear in linears.items()
    }
    _pack_experts(model, experts, stored, prepared)
    packed = {id(linear._parameters) for linear in linears.values()}
    packed |= {id(one._parameters) for embeddings in lookups.values() for one in embeddings.values()}
    if packs and isinstance(stored, GgufTensors):
        packed |= {id(holder) for holder in _pack_embeddings(model, stored, names, packed, prepared)}
    made: dict[int, Tensor] = {}  # tied tensors stay tied
    for holder, name, tensor in places:
        if id(holder) in packed and name == "weight":
            continue
        if id(tensor) not in made:
            value = stored[names[id(tensor)]].to(tensor.dtype, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        holder[name] = made[id(tensor)]
    if packs:
        install_own(model, weights, lookups, prepared.dtype)
    else:
        install(model, weights, prepared.device, backend=prepared.backend, dtype=prepared.dtype)
    return model


def _experts_of(model: nn.Module, stored: ModelTensors) -> dict[str, tuple[ExpertsForm, Places]]:
    """Return stacked experts whose weights a GGUF file holds one by one, and their names there."""
    names = [name.removesuffix(".weight") for name in stored if ".experts." in name]
    if not names or not isinstance(stored, GgufTensors):
        return {}
    return expert_places(model, stacked_experts(model), names)


def _pack_experts(
    model: nn.Module,
    experts: Mapping[str, tuple[ExpertsForm, Places]],
    stored: ModelTensors,
    prepared: PreparedModel,
) -> None:  # straight from the mapped file: the stack never exists
    """Replace stacked experts with packed ones, whose weights may be in blocks of different types."""
    for place, (form, names) in experts.items():

        def weights(name: str, expert: int, _: Tensor, own: Places = names) -> tuple[Weight, ...]:
            *first, last = (own[expert, part] for part in EXPERT_PARTS)
            chosen = first if name.endswith("gate_up_proj") else [last]
            return tuple(_weight(stored, f"{each}.weight", prepared) for each in chosen)

        install_experts(model, {place: form}, weights, in_cpp=True)


def keeps_blocks(kind: GgmlType, prepared: PreparedModel) -> bool:
    """Return True if a GPU's kernels multiply weights of a GGUF type in their blocks."""
    spec = LinearSpec(fmt=replace(kind, inputs=prepared.block_inputs), in_features=0, out_features=0)
    device = Device.of(prepared.device)
    return kind.on_gpus and select(spec.operation, spec, device, prepared.backend).is_triton


def _pack_embeddings(
    model: nn.Module, stored: GgufTensors, names: Mapping[int, str], packed: set[int], prepared: PreparedModel
) -> list[dict[str, Any]]:
    """Replace embeddings whose rows lie in blocks and that share no head's weight; return their parameters.

    `names`: stored names, by the ids of the skeleton's tensors; `packed`: ids of parameters packed elsewhere.
    """
    replaced = []
    for place, module in list(model.named_modules()):
        if not isinstance(module, nn.Embedding) or id(module._parameters) in packed:
            continue
        if not stored.kind(name := names[id(module.weight)]).is_float and is_plain_lookup(module):
            kernel = CpuLinear(_weight(stored, name, prepared))
            replace_linear(model, place, PackedEmbedding(kernel, prepared.dtype, scale_of(module)))
            replaced.append(module._parameters)
    return replaced


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (containing dictionary, name, tensor) for each parameter and buffer; tied ones are repeated."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            yield from ((holder, name, tensor) for name, tensor in holder.items() if tensor is not None)


def _weight(stored: ModelTensors, name: str, prepared: PreparedModel) -> Weight:
    """Return a Linear layer's weight: blocks as they are, others in the computation dtype or 16 bits."""
    if isinstance(stored, GgufTensors) and not (kind := stored.kind(name)).is_float:
        fmt = replace(kind, inputs=Inputs.FULL if _SENSITIVE.search(name) else prepared.block_inputs)
        return BlockWeight(fmt=fmt, rows=stored.blocks(name), is_mapped=stored.is_mapped(name))
    values, dtype = stored[name], prepared.dtype
    is_kept = dtype is torch.float32 and values.dtype in FLOATS
    return PlainWeight.narrowest(values if is_kept else values.to(dtype))
