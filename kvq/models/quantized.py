"""Models whose Linear layers are quantized: rounded while they are loaded, or read from their codes."""

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvq.errors import ConfigError, ModelError
from kvq.formats.weights import WeightCode, WeightFormat
from kvq.kernels import QuantizedWeight
from kvq.models.checkpoint import weight_files
from kvq.models.modules import load_module, load_module_from
from kvq.models.stored import StoredTensors
from kvq.weights import ROUTERS, install, round_weight
from kvq.weights.files import QuantizationScheme, parse_config, read_linear

_HEAD = WeightFormat(code=WeightCode.INT8)  # of integer formats: logits deserve 8 bits
_BITSANDBYTES = "bitsandbytes"
_KV_SCALES = (".k_scale", ".v_scale")


def load_rounded(
    folder: Path, dtype: torch.dtype | str, fmt: WeightFormat, device: torch.device, *, backend: str
) -> Any:
    """A folder's model, every Linear layer rounded to the nearest codes of `fmt`, the head to 8 bits.

    Raises:
        ModelError: damaged or incomplete.
        ConfigError: groups that don't divide a layer's inputs.
    """
    model = load_module(folder, "auto")  # as stored, and mapped: one layer at a time becomes codes
    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS
    }
    formats = {
        name: _HEAD if linear is head and fmt.code.is_integer else fmt for name, linear in linears.items()
    }
    _check(model, linears, formats)
    computed = _stored_dtype(model) if isinstance(dtype, str) else dtype

    def rounded(name: str) -> QuantizedWeight:
        weight = linears.pop(name).weight.detach().float()
        if not weight.isfinite().all():  # which rounding would hide
            raise ModelError(f"{folder}: {name}.weight holds NaN or infinity; download or copy it again")
        return round_weight(weight, formats[name])

    weights = {name: partial(rounded, name) for name in formats}
    install(model, weights, device, backend=backend, dtype=computed)
    return model.to(computed)


def _check(model: nn.Module, linears: dict[str, nn.Linear], formats: dict[str, WeightFormat]) -> None:
    """Raise ConfigError unless every layer's inputs can be cut into its format's groups."""
    if not formats:
        raise ConfigError(
            f"{type(model).__name__} has no Linear layers that could be rounded; use --weights auto"
        )
    for name, fmt in formats.items():
        try:
            fmt.groups(linears[name].in_features)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


def load_quantized(
    folder: Path,
    config_dict: Mapping[str, Any],
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    backend: str,
) -> Any:
    """A folder's model whose Linear layers are stored in codes: compressed-tensors, GPTQ, AWQ.

    The codes go to kernels as they are; transformers sees stand-ins without memory, so that it checks
    names and shapes of all tensors as it does for any model. Stacked experts, which are no Linear
    layers, are dequantized. bitsandbytes' layers are left to bitsandbytes.

    Raises:
        ModelError: damaged, incomplete, or quantized in a way that isn't read.
        ConfigError: a package is missing.
    """
    config = config_dict["quantization_config"]
    if isinstance(config, dict) and config.get("quant_method") == _BITSANDBYTES:
        return _with_bitsandbytes(folder, dtype)
    wanted = _dtype(config_dict) if isinstance(dtype, str) else dtype
    scheme = parse_config(config)
    stored = StoredTensors(weight_files(folder))
    weights = _read_weights(scheme, stored)
    plain = _other_tensors(scheme, stored, weights)
    if twice := [name for name in weights if f"{name}.weight" in plain]:
        raise ModelError(f"{folder} holds {twice[0]}.weight in codes and as it was; keep one of them")
    stand_ins = {name: _stand_in(weight, wanted) for name, weight in weights.items()}
    model = _load(folder, plain, stand_ins, wanted)
    places = _places(model, stand_ins)
    experts = [name for name in weights if name not in places]
    if experts:
        whole = {name: weights.pop(name).dequantize(wanted) for name in experts}
        model = _load(folder, plain, stand_ins | whole, wanted)
        places = _places(model, stand_ins)
    placed = {place: partial(weights.pop, name) for name, place in places.items()}
    install(model, placed, device, backend=backend, dtype=wanted)
    return model


def _stored_dtype(model: nn.Module) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _read_weights(scheme: QuantizationScheme, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """The weights that lie there in codes, by the layer's name."""
    names = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    names += [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    scaled = [name.removesuffix("_scale") for name in stored if name.endswith(".weight_scale")]
    names += [name.removesuffix(".weight") for name in scaled if name in stored]
    return {name: _read_weight(scheme, name, stored) for name in names}


def _read_weight(scheme: QuantizationScheme, name: str, stored: StoredTensors) -> QuantizedWeight:
    try:
        return read_linear(scheme, name, stored)
    except ModelError as error:
        path = next(stored.path_of(part) for part in stored if part.startswith(f"{name}."))
        raise ModelError(f"{path}: {error}") from error


def _other_tensors(
    scheme: QuantizationScheme, stored: StoredTensors, weights: Mapping[str, QuantizedWeight]
) -> dict[str, Tensor]:
    """What transformers gets as it is stored: all that is no code, no scale, and no scale of K or V."""
    taken = {part for name in weights for part in scheme.names_of(name)}
    ignored = _KV_SCALES if scheme.kv_scales else ()
    return {name: stored[name] for name in stored if name not in taken and not name.endswith(ignored)}


def _stand_in(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """A tensor of the weight's shape that takes one element of memory."""
    return torch.zeros(1, dtype=dtype).expand(weight.out_features, weight.in_features)


def _load(folder: Path, plain: dict[str, Tensor], whole: dict[str, Tensor], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    del config.quantization_config
    named = {f"{name}.weight": tensor for name, tensor in whole.items()}
    return load_module_from(folder, config, plain | named, dtype)


def _places(model: nn.Module, stand_ins: Mapping[str, Tensor]) -> dict[str, str]:
    """Where transformers put the stand-ins: names on disk to names of Linear layers."""
    names = {tensor.data_ptr(): name for name, tensor in stand_ins.items()}
    return {
        names[module.weight.data_ptr()]: place
        for place, module in model.named_modules()
        if type(module) is nn.Linear and module.weight.data_ptr() in names
    }


def _dtype(config_dict: Mapping[str, Any]) -> torch.dtype:
    """What the checkpoint says its unquantized tensors are."""
    name = str(config_dict.get("dtype", config_dict.get("torch_dtype"))).removeprefix("torch.")
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return known.get(name, torch.bfloat16)


def _with_bitsandbytes(folder: Path, dtype: torch.dtype | str) -> Any:
    for package in ("bitsandbytes", "accelerate"):
        if find_spec(package) is None:
            raise ConfigError(
                f"{folder} is quantized by bitsandbytes, which needs {package}: "
                f"pip install 'kvq-toolkit[bnb]'"
            )
    return load_module(folder, dtype)
