"""Names of kvq's formats in vLLM's options, and the recipes of these formats. Does not require vLLM."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvq.errors import ConfigError, KVQError, first_lines
from kvq.formats import KVRecipe
from kvq.formats.names import VLLM_FILE_PREFIX, VLLM_PREFIX, known_names

_log = logging.getLogger("vllm.kvq")
OPTION = "kvq"  # key in `--additional-config`, for versions of vLLM that accept only their own names
NAMES = tuple(VLLM_PREFIX + name for name in known_names() if "_per_channel" not in name)  # scales per token


def is_own(name: object) -> bool:
    """Return True if the value of `--kv-cache-dtype` names a kvq format."""
    return isinstance(name, str) and name.startswith((VLLM_PREFIX, VLLM_FILE_PREFIX))


def requested(kv_cache_dtype: str, additional: Mapping[str, Any] | None) -> str | None:
    """Return the format, pair or kvq.json named in the options, or None if no kvq format is named.

    Raises:
        ConfigError: both options name a format, or the name in `additional` is not a string.
    """
    option = (additional or {}).get(OPTION)
    named = without_prefix(kv_cache_dtype) if is_own(kv_cache_dtype) else None
    if option is None:
        return named
    if not isinstance(option, str) or not option:
        raise ConfigError(f"--additional-config {OPTION} must be a format or a kvq.json, got {option!r:.60}")
    if named is not None or kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype is {kv_cache_dtype} and --additional-config {OPTION} is {option}; name one"
        )
    return without_prefix(option)


def say_checked(model: str, name: str) -> str:
    """Log the result of kvq's load check for a model and a format, if any; return the logged message."""
    from kvq.models.check.load_check import recalled
    from kvq.models.loading.prepared import prepare

    try:
        prepared = prepare(model)
        recipe = prepared.recipe(without_prefix(name), whole_blocks=False)
        told = str(recalled(prepared, recipe) or "")
        if not told:  # full name: elsewhere, a bare name means scales over whole blocks
            full = name if name.endswith(".json") else replace(recipe, label="").name
            told = f"{name} was not checked on this model; kvq generate -m MODEL --kv {full} does it"
    except KVQError as error:
        told = f"{name} can't be checked on this model: {first_lines(error)}"
    _log.warning("%s", told)
    return told


@lru_cache(maxsize=64)
def recipe_of(name: str, head_dims: tuple[int, int], num_layers: int) -> KVRecipe:
    """Return the recipe for all layers; `head_dims`: (K, V) of the requesting layer, in elements.

    Raises:
        ConfigError: the format is unknown, or the file is for another model or lacks scales.
    """
    recipe = KVRecipe.named(name, [head_dims] * num_layers)
    if len(recipe.layers) != num_layers:
        raise ConfigError(f"{name} is for {len(recipe.layers)} layers, the model has {num_layers}")
    recipe.require_scales()
    return recipe


def without_prefix(name: str) -> str:
    """Return the format's name in kvq, without the prefix used in vLLM."""
    return name.removeprefix(VLLM_FILE_PREFIX).removeprefix(VLLM_PREFIX)
