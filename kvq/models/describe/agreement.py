"""Do a config.json and the headers of the weights describe one model? Told by names of fields and tensors.

A wrong shape is traced to its fields by trying: those count whose doubling changes it. So no family's rules
are written down here.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from kvq.errors import ModelError
from kvq.geometry import ModelGeometry, field_name
from kvq.models.describe.checkpoint import TensorEntry

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,9})\.")
_APART = "config.json and weights belong to different models, or config.json was edited"
_PACKED = 32  # at most so many numbers lie in one of a packed tensor's

Shape = tuple[int, ...]
Build = Callable[[Mapping[str, Any]], nn.Module]  # a module on the meta device, of a config.json's dict


def check_headers(
    folder: Path, config: Mapping[str, Any], geometry: ModelGeometry, entries: Iterable[TensorEntry]
) -> None:
    """Compare what needs no module: how many layers there are, and that heads are not beyond every tensor.

    Raises:
        ModelError: config.json says otherwise than the weights.
    """
    entries = list(entries)
    found = {int(match[1]) for entry in entries if (match := _LAYER.search(entry.name))}
    name = field_name(geometry.model_type, "num_hidden_layers")
    name = name if name in config or "num_layers" not in config else "num_layers"
    said, extra = config.get(name), config.get("num_nextn_predict_layers") or 0  # which nothing runs
    if type(said) is not int:
        kinds = config.get("layers_block_type")
        said = len(kinds) if isinstance(kinds, list) else 1 + geometry.last_layer
    if found and not said <= max(found) + 1 <= said + (extra if type(extra) is int else 0):
        says = f"says {name}" if name in config else f"leaves {name} at"
        raise ModelError(
            f"{folder}/config.json {says} {said}, but the weights hold layers {min(found)} to {max(found)}; "
            f"{_APART}"
        )
    longest = max((max(entry.shape, default=0) for entry in entries), default=0)
    for layer in geometry.layers:
        if (width := layer.kv_heads * max(layer.k_head_dim, layer.v_head_dim)) > longest * _PACKED:
            raise ModelError(
                f"{folder}/config.json says {layer.kv_heads} KV heads of {layer.k_head_dim} and "
                f"{layer.v_head_dim} numbers, {width} in all, but no tensor has more than {longest} rows; "
                f"{_APART}"
            )


def check_shapes(
    folder: Path, config: Mapping[str, Any], build: Build, shapes: Mapping[str, Shape], stored_bytes: int
) -> None:
    """Compare every parameter's shape with that of the tensor of its name.

    Parameters that transformers makes of several tensors have none; their number is held against the bytes.

    Raises:
        ModelError: a tensor of another shape; the message names the fields that it follows from.
    """
    model = build(config)
    unnamed = 0
    prefix = f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stored = shapes.get(name, shapes.get(name.removeprefix(prefix)))
        if stored is None:
            unnamed += parameter.numel()
        elif stored != tuple(parameter.shape):
            raise ModelError(_explained(folder, config, build, name, stored, tuple(parameter.shape)))
    if unnamed > _PACKED * stored_bytes:
        raise ModelError(
            f"{folder}/config.json describes a model of {unnamed:,} numbers and more, but the weights are "
            f"{stored_bytes:,} bytes; {_APART}"
        )


def _explained(
    folder: Path, config: Mapping[str, Any], build: Build, name: str, stored: Shape, wanted: Shape
) -> str:
    """Return the fields of config.json that a parameter's shape follows from, against what is stored."""
    axis = next((i for i, (a, b) in enumerate(zip(stored, wanted, strict=False)) if a != b), None)
    if axis is None or len(stored) != len(wanted):
        shapes = f"the shape {list(wanted)}, the weights {list(stored)}"
        return f"{folder}/config.json gives {name} {shapes}; {_APART}"
    fields = _fields_behind(config, build, name, axis)
    what = ("numbers" if len(stored) == 1 else ("rows", "columns", "layers")[axis]) if axis < 3 else "parts"
    has = f"{name} has {stored[axis]} {what}"
    if not fields:
        return f"{folder}/config.json leads to {wanted[axis]} {what}, but {has}; {_APART}"
    said = " and ".join(f"{field} {config[field]}" for field in fields)
    rest = "" if [config[field] for field in fields] == [wanted[axis]] else f", not {wanted[axis]}"
    return f"{folder}/config.json says {said}, but {has}{rest}; {_APART}"


def _fields_behind(config: Mapping[str, Any], build: Build, name: str, axis: int) -> list[str]:  # D211
    def size(changed: Mapping[str, Any]) -> int | None:
        try:
            return build(changed).get_parameter(name).shape[axis]
        except (ModelError, AttributeError, IndexError):  # another kind of model; it tells nothing
            return None

    now = size(config)
    return [
        field
        for field, value in config.items()
        if type(value) is int and value > 0 and size({**config, field: 2 * value}) not in (None, now)
    ]
