"""Models with quantized Linear layers: rounded while they are loaded, or read from stored codes."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kvq.errors import ConfigError, ModelError
from kvq.extras import BITSANDBYTES, require
from kvq.formats.checkpoints import QuantizationScheme, parse_config
from kvq.formats.weights import WeightCode, WeightFormat
from kvq.kernels import Device, LinearSpec, QuantizedWeight, select
from kvq.kernels.linear.cpu import CpuLinear
from kvq.models.describe.kv_scales import is_kv_scale
from kvq.models.describe.modules import load_config, load_module, load_module_from
from kvq.models.describe.text_part import ModelTensors, read_tensors
from kvq.weights import (
    EXPERT_PARTS,
    ROUTERS,
    expert_places,
    install,
    install_experts,
    round_weight,
    runs_library_code,
    stacked_experts,
)
from kvq.weights.files import read_linear

_HEAD = WeightFormat(code=WeightCode.INT8)  # the head's format if others are integers: logits deserve 8 bits
_PIECE = 1 << 20  # values rounded at a time, which takes several times their memory
_Stored = TypeVar("_Stored")


def load_rounded(  # D215: a million values at a time; no cache on disk
    folder: Path, dtype: torch.dtype, fmt: WeightFormat, device: torch.device, *, backend: str
) -> Any:
    """Return a folder's model with every Linear layer rounded to the nearest codes of `fmt`.

    The head gets 8 bits if `fmt` is an integer format. On CPUs, stacked experts are rounded, too.

    Raises:
        ModelError: the weights are damaged or incomplete.
        ConfigError: the format's groups don't divide a layer's inputs.
    """
    model = load_module(folder, "auto")  # as stored, and mapped: layers are quantized one at a time
    formats = rounded_formats(model, fmt)
    linears = {name: model.get_submodule(name) for name in formats}

    def rounded(name: str, values: Tensor, own: WeightFormat) -> QuantizedWeight:
        values = values.float()
        if not values.isfinite().all():  # rounding would hide this
            raise ModelError(f"{folder}: {name} holds NaN or infinity; download or copy it again")
        return round_weight(values, own)

    def layer(name: str) -> QuantizedWeight:
        weight = linears.pop(name).weight.detach()
        pieces = weight.split(max(1, _PIECE // weight.shape[1]))
        return QuantizedWeight.joined([rounded(f"{name}.weight", one, formats[name]) for one in pieces])

    weights = {name: partial(layer, name) for name in formats}
    install(model, weights, device, backend=backend, dtype=dtype)
    if (in_cpp := runs_experts(fmt, device, backend)) is not None:
        stacked = stacked_experts(model)
        install_experts(model, stacked, lambda name, _, x: rounded(name, x, fmt), in_cpp=in_cpp)
    return model.to(dtype)


def runs_experts(fmt: WeightFormat, device: torch.device, backend: str) -> bool | None:
    """Return True if quantized experts run in C++, False if in the reference; None on GPUs (left as stored).

    Raises:
        UnsupportedKernel: the named backend has no kernel for this device.
    """
    if device.type != "cpu":
        return None
    spec = LinearSpec(fmt=fmt, in_features=1, out_features=1)
    return select(spec.operation, spec, Device.of(device), backend).run is CpuLinear


def check_rounded_experts(model: nn.Module, fmt: WeightFormat) -> None:
    """Raise ConfigError if an expert's inputs can't be divided into the format's groups."""
    for name, form in stacked_experts(model).items():
        for own in ("gate_up_proj", "down_proj"):
            shape = model.get_submodule(name).get_parameter(own).shape
            _check_groups(fmt, shape[1 if form.is_transposed else 2], f"{name}.{own}")


def _check_groups(fmt: WeightFormat, in_features: int, name: str) -> None:
    try:
        fmt.groups(in_features)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def rounded_formats(model: nn.Module, fmt: WeightFormat) -> dict[str, WeightFormat]:
    """Return each Linear layer's format, keyed by name; the head has 8 bits if `fmt` is an integer format.

    Raises:
        ConfigError: no layer can be rounded, or a layer's inputs can't be divided into its format's groups.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and runs_library_code(module) and name.rpartition(".")[2] not in ROUTERS
    }
    if not linears:
        raise ConfigError(
            f"{type(model).__name__} has no Linear layers that could be rounded; use --weights auto"
        )
    formats = {
        name: _HEAD if linear is head and fmt.code.is_integer else fmt for name, linear in linears.items()
    }
    for name, own in formats.items():
        _check_groups(own, linears[name].in_features, name)
    return formats


def check_scheme(folder: Path, config: object) -> None:
    """Raise an error unless kvq can read weights with this quantization_config of a config.json.

    Raises:
        ModelError: kvq doesn't read the method, version or feature.
        ConfigError: a required package is missing.
    """
    if is_bitsandbytes(config):
        require(f"{folder}, quantized by bitsandbytes,", BITSANDBYTES)
    else:
        parse_config(config)


def is_bitsandbytes(config: object) -> bool:
    """Return True if a quantization_config leaves the layers to bitsandbytes."""
    return isinstance(config, Mapping) and config.get("quant_method") == "bitsandbytes"


def load_quantized(  # D183: transformers places stand-ins, which the codes then replace
    folder: Path, config_dict: Mapping[str, Any], dtype: torch.dtype, device: torch.device, *, backend: str
) -> Any:
    """Return a folder's model with quantized Linear layers (compressed-tensors, GPTQ or AWQ).

    Kernels use the codes unchanged. Stacked experts, which are not Linear layers, are dequantized first, and
    stay dequantized on GPUs. Layers quantized by bitsandbytes are left to bitsandbytes.

    Raises:
        ModelError: the weights are damaged, incomplete, or quantized in a way that kvq doesn't read.
    """
    config = config_dict["quantization_config"]
    if is_bitsandbytes(config):
        return load_module(folder, dtype)
    scheme = parse_config(config)
    stored = read_tensors(folder)
    weights = read_weights(scheme, stored)
    plain = plain_tensors(scheme, stored, weights)
    stand_ins = {  # each has one element of memory
        name: torch.zeros(1, dtype=dtype).expand(weight.out_features, weight.in_features)
        for name, weight in weights.items()
    }
    model = _load(folder, plain, stand_ins, dtype)
    places = _places(model, stand_ins)
    experts = {name: weight for name, weight in weights.items() if name not in places}
    if experts:
        whole = {name: weight.dequantize(dtype) for name, weight in experts.items()}
        model = _load(folder, plain, stand_ins | whole, dtype)
        del whole
        places = _places(model, stand_ins)
        _install_experts(model, experts, device, backend)
    placed = {place: partial(weights.pop, name) for name, place in places.items()}
    install(model, placed, device, backend=backend, dtype=dtype)
    return model


def _install_experts(  # D184: placed by name, then compared with the stack
    model: Any, weights: Mapping[str, QuantizedWeight], device: torch.device, backend: str
) -> None:
    """Replace stacked experts with the codes that a checkpoint stores per expert, if a kernel supports them.

    Experts stay dequantized if the codes' values differ from the values that transformers stacked.
    """
    for name, (form, own) in expert_places(model, stacked_experts(model), weights).items():
        experts = model.get_submodule(name)
        joined: dict[str, list[QuantizedWeight]] = {"gate_up_proj": [], "down_proj": []}
        for i in range(len(experts.down_proj)):
            gate, up, down = (weights[own[i, part]] for part in EXPERT_PARTS)
            if gate.fmt == up.fmt == down.fmt and gate.has_order_of(up):
                joined["gate_up_proj"].append(QuantizedWeight.joined((gate, up)))
                joined["down_proj"].append(down)
        formats = {weight.fmt for weight in joined["down_proj"]}
        agree = len(formats) == 1 and all(_are(joined[part], experts.get_parameter(part)) for part in joined)
        if agree and (in_cpp := runs_experts(formats.pop(), device, backend)) is not None:
            codes = partial(lambda own, full, i, _: own[full.rpartition(".")[2]][i], joined)
            install_experts(model, {name: form}, codes, in_cpp=in_cpp)


def _are(weights: list[QuantizedWeight], stacked: Tensor) -> bool:
    """Return True if a stacked tensor equals the dequantized weights."""
    pairs = zip(weights, stacked, strict=False)
    same = (torch.equal(weight.dequantize(values.dtype), values) for weight, values in pairs)
    return len(weights) == len(stacked) and all(same)


def read_weights(scheme: QuantizationScheme, stored: ModelTensors) -> dict[str, QuantizedWeight]:
    """Return the quantized weights among `stored`, keyed by layer name.

    Raises:
        ModelError: a tensor is missing or doesn't match the scheme.
    """
    weights = {}
    for name in coded_layers(stored):
        try:
            weights[name] = read_linear(scheme, name, stored)
        except ModelError as error:
            path = next(stored.path_of(part) for part in stored if part.startswith(f"{name}."))
            raise ModelError(f"{path}: {error}") from error
    return weights


def coded_layers(stored: Collection[str]) -> list[str]:
    """Return the names of Linear layers with quantized weights; `stored`: the names of all tensors."""
    names = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    names += [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    scaled = [name.removesuffix("_scale") for name in stored if name.endswith(".weight_scale")]
    return names + [name.removesuffix(".weight") for name in scaled if name in stored]


def plain_tensors(
    scheme: QuantizationScheme, stored: Mapping[str, _Stored], coded: Collection[str]
) -> dict[str, _Stored]:
    """Return the stored tensors other than codes, their scales, and K or V scales.

    Raises:
        ModelError: a weight is stored both quantized and unquantized.
    """
    taken = {part for name in coded for part in scheme.names_of(name)}
    plain = {name: stored[name] for name in stored if name not in taken and not is_kv_scale(name)}
    if twice := [name for name in coded if f"{name}.weight" in plain]:
        raise ModelError(f"the checkpoint holds {twice[0]}.weight in codes and as it was; keep one of them")
    return plain


def _load(folder: Path, plain: dict[str, Tensor], whole: dict[str, Tensor], dtype: torch.dtype) -> Any:
    named = {f"{name}.weight": tensor for name, tensor in whole.items()}
    return load_module_from(folder, load_config(folder), plain | named, dtype)


def _places(model: nn.Module, stand_ins: Mapping[str, Tensor]) -> dict[str, str]:
    """Map names on disk to the Linear layers in which transformers placed their stand-ins."""
    names = {tensor.data_ptr(): name for name, tensor in stand_ins.items()}
    return {
        names[module.weight.data_ptr()]: place
        for place, module in model.named_modules()
        if type(module) is nn.Linear and module.weight.data_ptr() in names
    }
