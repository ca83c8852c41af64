"""A loaded model: transformers' own module with kvq's attention, its geometry and its tokenizer."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvq.cache.memory import held_bytes
from kvq.errors import ConfigError, ModelError, first_lines, nearest
from kvq.formats.weights import parse_weight_format
from kvq.geometry import ModelGeometry
from kvq.models.checkpoint import content_digest, read_header, read_json, weight_files
from kvq.models.fused_layers import is_fused
from kvq.models.linear import invariant_rows, pack_linears, padded_rows
from kvq.models.live_geometry import live_geometry
from kvq.models.modules import import_class, load_module
from kvq.models.norms import fuse_norms
from kvq.models.quantized import load_quantized, load_rounded
from kvq.models.rope import pin_rope
from kvq.models.support import check_supported, rope_types
from kvq.weights.manifest import verify_manifest

_DEVICES = re.compile(r"cpu|mps|cuda(:\d{1,3})?")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LoadedWeights:
    """The weights of one model on one device. Made by `load_weights`."""

    def __init__(
        self,
        *,
        folder: Path,
        model: Any,
        geometry: ModelGeometry,
        device: torch.device,
        max_context: int,
        held_bytes: int = 0,
    ):
        self.folder = folder
        self.model = model
        self.geometry = geometry
        self.device = device
        self.max_context = max_context  # tokens
        self.held_bytes = held_bytes  # by which the device's memory grew when they were loaded

    @cached_property
    def digest(self) -> str:
        """Digest of all tensors of the checkpoint; reads the files once."""
        return content_digest(weight_files(self.folder))

    def step_rows(self, count: int) -> int:
        """Rows to pad a step of `count` tokens to: results then don't depend on the batch."""
        return padded_rows(max(count, self._fewest_rows[0])) if self._fewest_rows[0] else count

    def logit_rows(self, count: int) -> int:
        """The same for rows of logits."""
        return padded_rows(max(count, self._fewest_rows[1])) if self._fewest_rows[1] else count

    def forget_rows(self) -> None:
        """Find out anew what steps have to be padded to; after layers were exchanged."""
        self.__dict__.pop("_fewest_rows", None)

    @cached_property
    def _fewest_rows(self) -> tuple[int, int]:
        """Of a step and of its logits; 0 where nothing is padded."""
        if self.device.type != "cpu":
            return 0, 0
        body, head = invariant_rows(self.model, self.model.get_output_embeddings())
        return (0 if is_fused(self.model, len(self.geometry.layers)) else body), head

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            ModelError: the folder has none that loads without running its code.
        """
        return load_tokenizer(self.folder)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        ModelError: the folder has none that loads without running its code.
    """
    from transformers import AutoTokenizer

    config = folder / "tokenizer_config.json"
    if config.is_file() and read_json(config).get("auto_map"):
        raise ModelError(f"{config} has auto_map, code that would run at load; kvq never runs it")
    try:
        return AutoTokenizer.from_pretrained(
            folder, config=_tokenizers_config(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a damaged file makes the parsers raise
        raise ModelError(f"{folder} has no tokenizer that loads: {first_lines(error)}") from error


def _tokenizers_config(folder: Path) -> Any:
    """What a tokenizer's class is chosen by, where its own configuration names one.

    The model's whole configuration would import half of transformers and torch: a second and 150 MB
    for a process that has no model.
    """
    own, model = folder / "tokenizer_config.json", folder / "config.json"
    if not own.is_file() or not model.is_file() or not read_json(own).get("tokenizer_class"):
        return None
    from transformers import PreTrainedConfig

    given = read_json(model)
    config = PreTrainedConfig(name_or_path=str(folder))
    for name in ("model_type", "model_name", "tokenizer_class"):
        if isinstance(given.get(name), str):
            setattr(config, name, given[name])
    return config


def load_weights(
    folder: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_context: int | None = None,
    weights: str = "auto",
    backend: str = "auto",
) -> LoadedWeights:
    """Load a Hugging Face folder: safetensors only, no code from it, every tensor accounted for.

    `dtype="auto"` is the checkpoint's on a GPU and fp32 on a CPU. `max_context` in tokens limits
    the context and pins longrope and dynamic RoPE. `weights`: a format that Linear layers are rounded
    to here; "auto" is as they are stored. `backend` runs those that are quantized.

    Raises:
        ModelError: damaged, incomplete or refused; the message says which and why.
        ConfigError: an unknown device, dtype or format, or a context beyond the model's.
    """
    where = pick_device(device)
    fmt = None if weights == "auto" else parse_weight_format(weights)
    verify_manifest(folder)
    config_dict = read_json(folder / "config.json")
    geometry = check_supported(config_dict, max_context=max_context)
    context = _context(geometry, max_context, dynamic="dynamic" in rope_types(config_dict))
    for path in weight_files(folder):
        read_header(path)
    import_class(config_dict)
    before = held_bytes(where)
    wanted = _pick_dtype(dtype, where)
    if config_dict.get("quantization_config") is not None:
        if fmt is not None:
            raise ConfigError(
                f"{folder} holds quantized weights already; leave out weights={weights!r} (--weights)"
            )
        model = load_quantized(folder, config_dict, wanted, where, backend=backend)
    elif fmt is None:
        model = load_module(folder, wanted)
    else:
        model = load_rounded(folder, wanted, fmt, where, backend=backend)
    if not type(model)._supports_attention_backend:
        raise ModelError(f"kvq does not run {geometry.model_type}: its attention can't be replaced")
    if (live := live_geometry(model.config)) != geometry:
        raise ModelError(
            f"kvq reads {folder}/config.json as {geometry}, transformers as {live}; "
            f"please report this model, it would be run wrongly"
        )
    pin_rope(model, context)
    model = model.to(where).eval()
    if where.type == "cpu":
        pack_linears(model, backend=backend)
        fuse_norms(model)
        _unmap(model)
    return LoadedWeights(
        folder=folder,
        model=model,
        geometry=geometry,
        device=where,
        max_context=context,
        held_bytes=held_bytes(where) - before,
    )


def load_plain(folder: Path, *, dtype: str = "auto") -> Any:
    """The transformers model itself, on the CPU: its own attention, plain Linear layers.

    For what changes weights, such as quantizers; nothing is served from it. `dtype="auto"` is the
    checkpoint's. Checks are those of `load_weights`.

    Raises:
        ModelError: damaged, incomplete or refused; the message says which and why.
        ConfigError: an unknown dtype.
    """
    config_dict = read_json(folder / "config.json")
    geometry = check_supported(config_dict, max_context=1)  # of no consequence where nothing is served
    if config_dict.get("quantization_config") is not None:
        raise ModelError(f"{folder} is quantized already; take an unquantized copy")
    for path in weight_files(folder):
        read_header(path)
    exact = geometry.softcap is not None or geometry.has_sinks  # which torch's own attention leaves out
    picked = "auto" if dtype == "auto" else _pick_dtype(dtype, torch.device("cpu"))
    return load_module(folder, picked, attention="eager" if exact else "sdpa").eval()


def pick_device(device: str) -> torch.device:
    """Return the torch device for a name; `auto` is the first GPU, or the CPU.

    Raises:
        ConfigError: no such device on this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not _DEVICES.fullmatch(device):
        raise ConfigError(f"unknown device {device!r}; use auto, cpu, mps, cuda or cuda:N")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {device!r} is not usable here ({first_lines(error)}); use auto, cpu or cuda"
        ) from error
    return chosen


def _pick_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        allowed = ["auto", *DTYPES]
        raise ConfigError(
            f"unknown dtype {dtype!r}{nearest(dtype, allowed) or ';'} allowed: {', '.join(allowed)}"
        )
    return DTYPES[dtype]


def _context(geometry: ModelGeometry, max_context: int | None, *, dynamic: bool) -> int:
    if max_context is None:
        return geometry.max_context
    if max_context < 1 or (max_context > geometry.max_context and not dynamic):
        raise ConfigError(
            f"a context of {max_context} tokens was asked for; this model takes 1 to {geometry.max_context}"
        )
    return max_context


def _unmap(model: Any) -> None:
    """Copy what is still mapped from the checkpoint: one small tensor would keep all its pages resident."""
    for parameter in model.parameters():
        if not parameter.is_mkldnn:
            parameter.data = parameter.data.clone()
