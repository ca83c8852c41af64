"""A model without its weights: transformers' own module on torch's meta device, from headers alone.

What a checkpoint lacks, has too much of or has in other shapes is found in a tenth of a second, before
gigabytes are read.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ModelError, first_lines
from kvq.formats.checkpoints.fields import shown
from kvq.geometry import parse_geometry
from kvq.models.describe.agreement import check_shapes
from kvq.models.describe.modules import build_on_meta, load_config, load_module_from, unquantized
from kvq.models.describe.text_part import read_tensors
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
from kvq.weights.files import parse_config, stored_shape

_log = logging.getLogger("kvq")


class _StandIn(Tensor):
    """A tensor without memory, which stays so wherever a loader moves it."""

    def to(  # type: ignore[override]  # torch's overloads, without what no loader asks for
        self, *_: object, dtype: torch.dtype | None = None, device: object = None, non_blocking: bool = False
    ) -> Tensor:
        if dtype in (None, self.dtype):
            return self.as_subclass(Tensor)  # shares the storage that identifies its source
        return torch.empty(self.shape, dtype=dtype, device="meta")


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A model without its weights. Made by `build_skeleton`."""

    model: Any  # every parameter on the meta device
    stand_ins: Mapping[str, Tensor]  # what transformers made it of, by name

    def source(self, tensor: Tensor) -> str | None:
        """The name of what transformers took as it is for a tensor of the model; None if it made that one."""
        name = self._names.get(tensor.untyped_storage()._cdata)
        if name is None:
            return None
        whole = self.stand_ins[name]
        is_whole = tensor.shape == whole.shape and tensor.stride() == whole.stride()
        return name if is_whole else None

    @cached_property
    def _names(self) -> dict[int, str]:
        """Return tensor names by the number of their storage."""
        return {tensor.untyped_storage()._cdata: name for name, tensor in self.stand_ins.items()}


def build_skeleton(prepared: PreparedModel) -> Skeleton | None:
    """Return the module of a model that was prepared, every parameter on the meta device.

    None where transformers can't make one without numbers; then loading tells.

    Raises:
        ModelError: tensors that are missing, too many or misshapen, or a model that would be run wrongly.
        ConfigError: groups of a weight format that don't divide a layer's inputs.
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
    if is_bitsandbytes(config):  # whose layers are made from the numbers
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
    return Skeleton(model=model, stand_ins=tensors)


def check_runs(model: Any, prepared: PreparedModel) -> None:
    """Raise ModelError unless a model's attention can be replaced, and its shape is the one read here."""
    if not can_replace_attention(model):
        raise ModelError(f"kvq does not run {prepared.geometry.model_type}: its attention can't be replaced")
    if not is_listed(prepared.geometry):
        return  # read off transformers' own code
    live, ours = (x.expanded() for x in (parse_geometry(model.config.to_dict()), prepared.geometry))
    if live != ours:
        name = next(
            field.name for field in fields(ours) if getattr(ours, field.name) != getattr(live, field.name)
        )
        here, there = shown(getattr(ours, name)), shown(getattr(live, name))
        raise ModelError(
            f"kvq reads {name} in {prepared.folder}/config.json as {here}, transformers as {there}; correct "
            f"the file, or report this model: it would be run wrongly"
        )


def _stand_ins(prepared: PreparedModel, config: object) -> dict[str, Tensor]:
    """Return the tensors that transformers would get, by name, without memory."""
    entries = {entry.name: entry for entry in prepared.entries}
    if config is None or is_bitsandbytes(config):
        return {
            name: _stand_in(entry.shape, prepared.dtype)
            for name, entry in entries.items()
            if f"{name}.absmax" not in entries  # four bits a number, packed without their shape
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
