"""Values of a config.json that no model has: refused before a size of 10^18 is looped over or allocated."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvq.errors import ModelError
from kvq.formats.checkpoints.fields import shown
from kvq.models.describe.checkpoint import read_json

_LARGEST = 1 << 53  # what all readers of JSON agree on; a rope_theta may be 10^10
_MOST_EXPERTS = 10_000  # since a module is made for each
_MOST_LAYERS = 10_000
_NUMBERS_OF_LAYERS = ("hidden_layers", "num_layers", "n_layer", "n_layers", "shared_layers")  # ends of names
_POSITIVE = ("rope_theta", "rotary_emb_base", "factor")  # ends of names; logits would be NaN otherwise
_MAY_BE_ZERO = "loss"  # in names, which nothing but training reads
_MAY_BE_INFINITE = "_limit"  # ends of names
_FLOAT, _FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")


def with_floats(value: Any) -> Any:
    """Return JSON with floats for what transformers saves as `{"__float__": "Infinity"}` and its like."""
    if isinstance(value, Mapping):
        if _is_float(value):
            return float(value[_FLOAT])
        return {key: with_floats(inner) for key, inner in value.items()}
    return [with_floats(inner) for inner in value] if isinstance(value, list) else value


def _is_float(value: Mapping[str, Any]) -> bool:
    return value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS


def check_values(folder: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    """Look at every number, the dtype, the architectures and the ids of tokens.

    Raises:
        ModelError: one that can't be; the message names its field.
    """
    where = folder / "config.json"
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
        _check_ids(own, read_json(own), vocab_size)


def _check_ids(where: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    """Ends of texts that never come, and padding that the embedding has no row for; -1 is none, to some."""
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
    """Every value that is no object and no list, under the names that lead to it."""
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
