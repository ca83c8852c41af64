"""Construction of transformers' own modules from safetensors alone, with every tensor accounted for."""

import copy
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvq.cache.transformers.attention import PACKED_NAME, register_attention
from kvq.errors import ModelError, first_lines
from kvq.formats.checkpoints.fields import shown
from kvq.geometry.support import BATCH_DEPENDENT_ROPE
from kvq.kernels.cores import settle_threads
from kvq.kernels.other_threads import watch_other_threads
from kvq.lazy import import_whole, uncollected
from kvq.models.describe.checkpoint import config_place, is_gguf
from kvq.models.describe.config_values import with_floats
from kvq.models.describe.kv_scales import is_kv_scale
from kvq.models.describe.text_models import know_text_model
from kvq.models.describe.text_part import is_read_apart, read_config, read_tensors, read_unread

_loading = threading.Lock()  # two concurrent loads break transformers permanently
_DERIVED = (".inv_freq", ".attn.bias", ".attn.masked_bias")  # buffers that old checkpoints stored


@contextmanager
def loading() -> Iterator[None]:  # D210: a dozen unrelated errors become ModelError
    """Allow one thread at a time to load with transformers, and suppress transformers' log messages."""
    register_attention()
    settle_threads()
    watch_other_threads()
    with _loading, quiet_logs("transformers"):
        yield


def import_class(config_dict: Mapping[str, Any]) -> None:
    """Import the model's classes, so that their memory is not counted as weights."""
    import_whole("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    with suppress(KeyError, ValueError, ImportError):  # loading reports it
        AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(config_dict["model_type"]))]


def load_config(folder: Path) -> Any:
    """Return the transformers configuration of a model folder.

    Raises:
        ModelError: the configuration can't be read.
    """
    import_whole("transformers")
    from transformers import AutoConfig

    try:
        with uncollected(), quiet_logs("transformers"):
            if is_read_apart(folder):
                return config_of(read_config(folder))
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything for a damaged file
        raise _blamed(folder, read_config(folder), config_of, error) from error


def build_on_meta(folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """Return the module that a config.json's dict describes, on the meta device.

    Raises:
        ModelError: the dict describes no valid module; the message names the field.
    """

    def build(given: Mapping[str, Any]) -> nn.Module:
        from transformers import AutoModelForCausalLM

        with uncollected(), loading(), torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config_of(given))
            return model

    try:
        return build(config)
    except Exception as error:  # the family's code may raise anything for unfit values
        raise _blamed(folder, config, build, error) from error


def build_random(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Return the module that a config.json's dict describes, randomly initialized as before training.

    The module is built on `device`, with kvq's attention.
    """
    from transformers import AutoModelForCausalLM

    with loading(), device:
        return AutoModelForCausalLM.from_config(
            config_of(config), dtype=dtype, attn_implementation=PACKED_NAME
        )


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json's dict without the setting that makes transformers expect quantized weights."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def config_of(given: Mapping[str, Any]) -> Any:
    """Return transformers' configuration for a config.json's dict."""
    return type(default_config(given)).from_dict(copy.deepcopy(with_floats(given)))


def default_config(given: Mapping[str, Any]) -> Any:
    """Return transformers' default configuration for a model family.

    Raises:
        KeyError, ValueError: the dict names no family, or a family unknown to transformers.
    """
    from transformers import AutoConfig

    know_text_model(given["model_type"])
    return AutoConfig.for_model(given["model_type"])


def _blamed(
    folder: Path, config: Mapping[str, Any], make: Callable[[Mapping[str, Any]], object], error: Exception
) -> ModelError:
    """Return an error naming a field whose removal avoids `error`, or else a field that alone causes it."""
    kind, cause = {"model_type": config["model_type"]}, first_lines(error)
    # Keep only the check's own message from its report
    told = re.sub(r"<class '?([\w.]*)'?>?", r"\1", cause.rpartition("Error: ")[2])
    others = {name: value for name, value in config.items() if name not in kind}
    rests = {name: {key: other for key, other in config.items() if key != name} for name in others}
    dropped = [name for name, rest in rests.items() if _error(make, rest) is None]
    alike = (name for name, value in others.items() if _error(make, {**kind, name: value}) == cause)
    name = dropped[0] if dropped else next(alike, None)
    if name is None:
        return ModelError(f"{config_place(folder)}: its values don't go together: {told}")
    default = getattr(default_config(kind), name, None) if dropped else None
    remedy = "" if default is None else f", or drop it, which leaves it at {shown(default)}"
    what = f"{name} can't be {shown(config[name])} in a {kind['model_type']} model; correct it{remedy}"
    return ModelError(f"{config_place(folder)}: {what} (transformers: {told})")


def _error(make: Callable[[Mapping[str, Any]], object], config: Mapping[str, Any]) -> str | None:
    try:
        with quiet_logs("transformers"):
            make(config)
    except Exception as error:  # noqa: BLE001 - any error is the result
        return first_lines(error)
    return None


def load_module(folder: Path, dtype: torch.dtype | str, *, attention: str = PACKED_NAME) -> Any:
    """Load a folder's model in `dtype` ("auto": the checkpoint's) on the CPU, for kvq's attention by default.

    Raises:
        ModelError: the weights are damaged or incomplete; the message says how.
    """
    from transformers import AutoModelForCausalLM

    if is_read_apart(folder) or read_unread(folder):
        config, stored = load_config(folder), read_tensors(folder)
        stated = torch.float32 if is_gguf(folder) else config.dtype or torch.float32
        chosen = dtype if isinstance(dtype, torch.dtype) else stated
        tensors = {name: stored[name].to(chosen) for name in stored} if is_gguf(folder) else stored
        return load_module_from(folder, config, tensors, chosen, attention=attention)
    return _load(
        folder,
        lambda settings: AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, local_files_only=True, **settings
        ),
        {"dtype": dtype, "attn_implementation": attention},
    )


def load_module_from(
    folder: Path,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    attention: str = PACKED_NAME,
) -> Any:
    """Load a module from `config`, unquantized tensors and the folder's generation settings.

    Raises:
        ModelError: the weights are damaged or incomplete; the message says how.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    if hasattr(config, "quantization_config"):  # or transformers would expect quantized weights
        del config.quantization_config

    def make(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        made = AutoModelForCausalLM._model_mapping[type(config)]
        model, info = made.from_pretrained(None, config=config, state_dict=dict(tensors), **settings)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        return model, info

    return _load(folder, make, {"dtype": dtype, "attn_implementation": attention})


def _load(
    folder: Path, make: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]], settings: dict[str, Any]
) -> Any:
    """Return the module that `make` loads; raise ModelError unless every tensor is accounted for."""
    try:
        with loading():  # mismatches are reported below, in kvq's words
            model, info = make({**settings, "output_loading_info": True, "ignore_mismatched_sizes": True})
    except Exception as error:  # transformers may raise anything for a damaged folder
        raise ModelError(f"{folder} can't be loaded: {first_lines(error)}") from error
    _check_whole(folder, info)
    return model


def pin_rope(model: Any, max_context: int) -> None:
    """Fix the frequencies of every longrope or dynamic RoPE module for a context of `max_context` tokens.

    Each token is then rotated in the same way in any batch: longrope uses its short factors if
    `max_context` is within the original training length, else its long factors, for all positions.

    Raises:
        ModelError: the model has a batch-dependent RoPE that can't be pinned.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            if any(part in BATCH_DEPENDENT_ROPE for part in kind.values()):
                raise ModelError(
                    f"kvq does not run {model.config.model_type} with {sorted(set(kind.values()))} RoPE "
                    f"per layer type: its frequencies change with batch neighbours and can't be pinned"
                )
        elif kind in BATCH_DEPENDENT_ROPE:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, module.inv_freq.device, seq_len=max_context
            )
            module.inv_freq.data = frequencies.to(module.inv_freq.dtype)
            module.attention_scaling = scaling
            module.rope_type = f"pinned at {max_context} tokens"


def _check_whole(folder: Path, info: dict[str, Any]) -> None:
    """Raise ModelError unless the tensors and the module's parameters match one to one."""
    missing = sorted(info["missing_keys"])
    unread = read_unread(folder) if missing else {}
    if odd := next((name for name in missing if name in unread), None):
        raise ModelError(
            f"{folder}: {odd} is stored as {unread[odd]}, which kvq doesn't read; take a copy in BF16 or F32"
        )
    if missing == ["lm_head.weight"]:
        raise ModelError(
            f"{folder} lacks lm_head.weight, and its config.json does not say that the embedding serves for "
            f"it (tie_word_embeddings: true); download both again"
        )
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} tensors, first {missing[0]}; download it again, config.json too"
        )
    unexpected = [name for name in sorted(info["unexpected_keys"]) if not is_kv_scale(name)]
    if extra := [name for name in unexpected if not name.endswith(_DERIVED)]:
        raise ModelError(
            f"{folder} holds {len(extra)} tensors that its config.json has no place for, first {extra[0]}; "
            f"config and weights don't belong together"
        )
    if wrong := info["mismatched_keys"]:
        name, has, wanted = min(wrong)
        raise ModelError(
            f"{config_place(folder)} gives {name} the shape {list(wanted)}, the weights {list(has)}"
        )


@contextmanager
def quiet_logs(*names: str, level: int = logging.ERROR) -> Iterator[None]:
    """Suppress these loggers' messages below `level` and transformers' progress bars."""
    from transformers.utils import logging as hf_logging

    loggers = [logging.getLogger(name) for name in names]
    levels, bars = [logger.level for logger in loggers], hf_logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(level)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
        if bars:
            hf_logging.enable_progress_bar()
