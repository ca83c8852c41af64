"""Checks of a config.json's values and of its agreement with the weights' headers.

Invalid values are rejected before, say, a loop or an allocation uses a size of 10^18. A wrong shape is traced
to its config fields by trial: doubling such a field changes the shape. No family-specific rules are needed.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvq.errors import ModelError
from kvq.formats.checkpoints.fields import shown
from kvq.formats.tensor_entry import TensorEntry
from kvq.geometry import ModelGeometry, field_name
from kvq.models.describe.checkpoint import config_place, is_gguf, read_json

_LARGEST = 1 << 53  # exact in all JSON readers; a rope_theta may be 10^10
_MOST_EXPERTS = 10_000  # since a module is built for each
_MOST_LAYERS = 10_000
_NUMBERS_OF_LAYERS = ("hidden_layers", "num_layers", "n_layer", "n_layers", "shared_layers")  # suffixes
_POSITIVE = ("rope_theta", "rotary_emb_base", "factor")  # suffixes; logits would be NaN otherwise
_MAY_BE_ZERO = "loss"  # part of the names of fields that only training reads
_MAY_BE_INFINITE = "_limit"  # suffix
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,9})\.")
_PACKED = 32  # maximum number of values in one element of a packed tensor
_FLOAT, _FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")


def with_floats(value: Any) -> Any:
    """Return JSON with floats in place of transformers' objects such as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if _is_float(value):
            return float(value[_FLOAT])
        return {key: with_floats(inner) for key, inner in value.items()}
    return [with_floats(inner) for inner in value] if isinstance(value, list) else value


def _is_float(value: Mapping[str, Any]) -> bool:
    return value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS


def check_values(folder: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    """Check every number, the dtype, the architectures and the token ids of a config.json.

    Raises:
        ModelError: a value is invalid; the message names its field.
    """
    where = config_place(folder)
    for name, value in _values(config):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number:
            if name.endswith(_POSITIVE) and value is not None:
                raise ModelError(f"{where}: {name} must be a number above 0, got {shown(value)}; correct it")
            continue
        is_possible = math.isfinite(value) or (name.endswith(_MAY_BE_INFINITE) and value > 0)
        if not is_possible or (abs(value) > _LARGEST and isinstance(value, int)):
            raise ModelError(f"{where}: {name} is {shown(value)}, which no model's can be; correct it")
        if name.endswith(_POSITIVE) and value <= 0 and _MAY_BE_ZERO not in name:
            raise ModelError(f"{where}: {name} must be above 0, got {shown(value)}; correct it")
        for is_meant, most in (
            ("experts" in name, _MOST_EXPERTS),
            (name.endswith(_NUMBERS_OF_LAYERS), _MOST_LAYERS),
        ):
            if is_meant and value > most:
                raise ModelError(f"{where}: {name} may be up to {most}, got {shown(value)}")
    given = config.get("architectures")
    is_list = isinstance(given, list) and all(isinstance(one, str) for one in given)
    if given is not None and not is_list:
        raise ModelError(
            f"{where}: architectures must be a list of names such as ['LlamaForCausalLM'], "
            f"got {shown(given)}; correct it"
        )
    for name in ("dtype", "torch_dtype"):
        value = config.get(name, "auto")
        text = value.removeprefix("torch.") if isinstance(value, str) else ""
        if value not in (None, "auto") and not isinstance(getattr(torch, text or "none", None), torch.dtype):
            raise ModelError(
                f"{where}: {name} must be a type of torch's such as 'bfloat16' or 'float32', got "
                f"{shown(value)}"
            )
    _check_ids(where, config, vocab_size)
    own = folder / "generation_config.json"
    if own.is_file():
        _check_ids(str(own), read_json(own), vocab_size)


def _check_ids(where: str, config: Mapping[str, Any], vocab_size: int) -> None:
    """Raise ModelError for end or padding ids outside the vocabulary, except -1, which may mean none."""
    end = config.get("eos_token_id")
    ids = end if isinstance(end, list) else [] if end is None else [end]
    pad = config.get("pad_token_id")
    named = [("eos_token_id", value) for value in ids] + ([] if pad is None else [("pad_token_id", pad)])
    for name, value in named:
        if type(value) is not int or not -1 <= value < vocab_size:
            raise ModelError(
                f"{where}: {name} must be a token's id, 0 to {vocab_size - 1}, or a list of ends; "
                f"got {shown(value)}"
            )


def _values(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is neither an object nor a list, with its dotted name."""
    if isinstance(value, Mapping) and _is_float(value):
        yield name, float(value[_FLOAT])
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, name)
    else:
        yield name, value


Shape = tuple[int, ...]
Build = Callable[[Mapping[str, Any]], nn.Module]  # a config.json's dict -> a module on the meta device


def _apart(folder: Path) -> str:
    if is_gguf(folder):
        return "metadata and weights don't belong together; take another copy"
    return "config.json and weights belong to different models, or config.json was edited"


def check_headers(
    folder: Path, config: Mapping[str, Any], geometry: ModelGeometry, entries: Iterable[TensorEntry]
) -> None:
    """Check the number of layers, and whether a tensor is large enough for the heads, building no module.

    Raises:
        ModelError: config.json contradicts the weights.
    """
    entries = list(entries)
    found = {int(match[1]) for entry in entries if (match := _LAYER.search(entry.name))}
    name = field_name(geometry.model_type, "num_hidden_layers")
    name = name if name in config or "num_layers" not in config else "num_layers"
    said, extra = config.get(name), config.get("num_nextn_predict_layers") or 0  # never run
    if type(said) is not int:
        kinds = config.get("layers_block_type")
        said = len(kinds) if isinstance(kinds, list) else 1 + geometry.last_layer
    if found and not said <= max(found) + 1 <= said + (extra if type(extra) is int else 0):
        says = f"says {name}" if name in config else f"leaves {name} at"
        raise ModelError(
            f"{config_place(folder)} {says} {said}, but the weights hold layers {min(found)} to "
            f"{max(found)}; {_apart(folder)}"
        )
    longest = max((max(entry.shape, default=0) for entry in entries), default=0)
    for layer in geometry.layers:
        if (width := layer.kv_heads * max(layer.k_head_dim, layer.v_head_dim)) > longest * _PACKED:
            raise ModelError(
                f"{config_place(folder)} says {layer.kv_heads} KV heads of {layer.k_head_dim} and "
                f"{layer.v_head_dim} numbers, {width} in all, but no tensor has more than {longest} rows; "
                f"{_apart(folder)}"
            )


def check_shapes(
    folder: Path, config: Mapping[str, Any], build: Build, shapes: Mapping[str, Shape], stored_bytes: int
) -> None:
    """Compare every parameter's shape with the shape of the stored tensor of the same name.

    Parameters that transformers combines from several tensors have no such tensor; only their total size is
    checked.

    Raises:
        ModelError: a tensor's shape differs; the message names the config fields that determine it.
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
            f"{config_place(folder)} describes a model of {unnamed:,} numbers and more, but the weights are "
            f"{stored_bytes:,} bytes; {_apart(folder)}"
        )


def _explained(
    folder: Path, config: Mapping[str, Any], build: Build, name: str, stored: Shape, wanted: Shape
) -> str:
    """Return a message that compares a stored shape with the config fields that determine it."""
    axis = next((i for i, (a, b) in enumerate(zip(stored, wanted, strict=False)) if a != b), None)
    if axis is None or len(stored) != len(wanted):
        shapes = f"the shape {list(wanted)}, the weights {list(stored)}"
        return f"{config_place(folder)} gives {name} {shapes}; {_apart(folder)}"
    fields = _fields_behind(config, build, name, axis)
    what = ("numbers" if len(stored) == 1 else ("rows", "columns", "layers")[axis]) if axis < 3 else "parts"
    has = f"{name} has {stored[axis]} {what}"
    if not fields:
        return f"{config_place(folder)} leads to {wanted[axis]} {what}, but {has}; {_apart(folder)}"
    said = " and ".join(f"{field} {config[field]}" for field in fields)
    rest = "" if [config[field] for field in fields] == [wanted[axis]] else f", not {wanted[axis]}"
    return f"{config_place(folder)} says {said}, but {has}{rest}; {_apart(folder)}"


def _fields_behind(config: Mapping[str, Any], build: Build, name: str, axis: int) -> list[str]:  # D211
    def size(changed: Mapping[str, Any]) -> int | None:
        try:
            return build(changed).get_parameter(name).shape[axis]
        except (ModelError, AttributeError, IndexError):  # another kind of model, which reveals nothing
            return None

    now = size(config)
    return [
        field
        for field, value in config.items()
        if type(value) is int and value > 0 and size({**config, field: 2 * value}) not in (None, now)
    ]
