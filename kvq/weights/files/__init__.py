"""Quantized weights on disk: tensors and configs in the formats that other programs load.

Tensors are converted to and from `QuantizedWeight`; nothing here opens a file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvq.errors import ConfigError, ModelError, nearest
from kvq.formats.checkpoints import QuantizationScheme, config_groups, flat_config, parse_config
from kvq.formats.checkpoints.fields import WHERE
from kvq.formats.checkpoints.scheme import LayerScheme
from kvq.formats.weights import Inputs, WeightCode, WeightFormat
from kvq.kernels.weight import QuantizedWeight
from kvq.weights.files import awq, compressed_tensors, gptq

_TENSORS = {"compressed-tensors": compressed_tensors, "autogptq": gptq, "autoawq": awq}
FILE_FORMATS = tuple(_TENSORS)
TRANSFORMERS_NEEDS = {  # packages in addition to transformers 5, which reports missing ones one at a time
    "compressed-tensors": ("compressed-tensors",),
    "autogptq": ("gptqmodel", "optimum", "accelerate"),
    "autoawq": ("gptqmodel", "accelerate"),
    "gguf": ("gguf",),
}
_TOLD = ("code", "group_size", "inputs")  # properties of a format that every config contains
_OTHER = "write compressed-tensors"


def check_fits(file_format: str, fmt: WeightFormat) -> None:
    """Raise ConfigError with alternatives unless files of this format can store weights in `fmt`."""
    if file_format not in FILE_FORMATS:
        raise ConfigError(
            f"unknown file format {file_format!r}{nearest(file_format, [*FILE_FORMATS, 'gguf']) or ';'} "
            f"allowed: {', '.join(FILE_FORMATS)} and, for one file, gguf"
        )
    plain = fmt.code.is_integer and fmt.inputs is Inputs.FULL
    if file_format == "autogptq" and not (plain and fmt.symmetric):
        raise ConfigError(f"autogptq holds symmetric int8, int4 and int3 weights, got {fmt.name}; {_OTHER}")
    if file_format == "autoawq" and not (plain and fmt.code is WeightCode.INT4):
        raise ConfigError(f"autoawq holds int4 weights, got {fmt.name}; {_OTHER}")


def pack_linear(file_format: str, name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors that store the weight of the layer `name`.

    Raises:
        ConfigError: the file format can't store this weight's format, sizes, scales or order of inputs.
    """
    check_fits(file_format, weight.fmt)
    tensors: dict[str, Tensor] = _TENSORS[file_format].pack_linear(name, weight)
    return tensors


def read_linear(scheme: QuantizationScheme, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """Return the weight of the layer `name` from its tensors, `scheme.names_of(name)`.

    Raises:
        ModelError: a tensor is missing, or its type, shape or values don't match the scheme.
    """
    layer = _layer(scheme, name)
    try:
        weight: QuantizedWeight = _TENSORS[scheme.file_format].read_linear(layer, name, tensors)
    except ConfigError as error:  # groups that don't divide the inputs
        raise ModelError(f"{name} as {layer.fmt.name}, which {WHERE} names: {error}") from error
    return weight


def stored_shape(scheme: QuantizationScheme, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the shape [out, in] of the layer `name`, without reading codes.

    Raises:
        ModelError: a tensor is missing or is not a matrix.
    """
    layer = _layer(scheme, name)
    if missing := [part for part in scheme.names_of(name) if part not in tensors]:
        raise ModelError(
            f"tensor {missing[0]} is missing; the checkpoint or its quantization_config is damaged"
        )
    try:
        shape: tuple[int, int] = _TENSORS[scheme.file_format].stored_shape(layer, name, tensors)
    except ValueError as error:
        raise ModelError(f"the tensors of {name} must be matrices: {error}") from error
    return shape


def _layer(scheme: QuantizationScheme, name: str) -> LayerScheme:
    layer = scheme.layer_of(name)
    if layer is None:
        raise ModelError(f"{WHERE} doesn't say that {name} is quantized")
    return layer


def quantization_config(
    file_format: str,
    formats: Mapping[str, WeightFormat],
    ignore: Sequence[str],
    *,
    kv_scales: bool,
    act_order: bool = False,
) -> dict[str, Any]:
    """Return a config.json's quantization_config, verified by reading it back.

    `formats`: format of each quantized layer, keyed by full name; `ignore`: names of Linear layers that keep
    their weights; `kv_scales`: whether static FP8 scales of K and V are stored; `act_order`: whether any
    layer's groups consist of scattered inputs.

    Raises:
        ConfigError: the file format can't express this combination.
    """
    if not formats:
        raise ConfigError("no layer is quantized; a quantization_config needs one at least")
    for fmt in formats.values():
        check_fits(file_format, fmt)
    if file_format == "compressed-tensors":
        config = config_groups.dump(formats, ignore, kv_scales=kv_scales)
    else:
        kinds = {fmt.name: fmt for fmt in formats.values()}
        if len(kinds) > 1:
            told = ", ".join(sorted(kinds))
            raise ConfigError(f"{file_format} holds one format for all layers, got {told}; {_OTHER}")
        if kv_scales:
            raise ConfigError(f"{file_format} can't hold scales of K and V; {_OTHER}")
        (fmt,) = kinds.values()
        if file_format == "autogptq":
            config = flat_config.dump_gptq(fmt, list(formats), ignore, act_order=act_order)
        else:
            config = flat_config.dump_awq(fmt, ignore)
    _check_reads_back(config, formats, ignore)
    return config


def _check_reads_back(
    config: dict[str, Any], formats: Mapping[str, WeightFormat], ignore: Sequence[str]
) -> None:
    scheme = parse_config(config)
    for name, fmt in formats.items():
        found = scheme.format_of(name)
        if found is None or any(getattr(found, part) != getattr(fmt, part) for part in _TOLD):
            raise ConfigError(
                f"{scheme.file_format} can't say that {name} is {fmt.name} beside layers that are left out "
                f"({', '.join(ignore) or 'none'}); {_OTHER} or quantize another set of layers"
            )
    kept = [name for name in ignore if scheme.format_of(name) is not None]
    if kept:
        raise ConfigError(f"{scheme.file_format} can't say that {kept[0]} is not quantized; {_OTHER}")
