"""Tensors of the compressed-tensors format: pack-quantized, int-quantized, float-quantized, naive-quantized.

Source: the compressed-tensors package, version 0.20, folders `compressors/pack_quantized` and
`compressors/naive_quantized`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvq.errors import ModelError
from kvq.formats.checkpoints.config_groups import INT, PACKED, version_of
from kvq.formats.checkpoints.scheme import LayerScheme
from kvq.formats.weights import WeightCode, WeightFormat
from kvq.kernels.weight import QuantizedWeight
from kvq.weights.files.tensors import take, take_matrix, take_order, take_scale
from kvq.weights.files.words import num_words, offset, pack_words, signed, unpack_words, whole_groups

_NAN_BITS = 0x7F


def pack_linear(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of one layer.

    Raises:
        ConfigError: the groups consist of scattered inputs, which the package no longer reads.
    """
    fmt, bits = weight.fmt, weight.fmt.code.bits
    tensors = {f"{name}.weight_scale": weight.scale.contiguous()}  # [out, groups]
    if fmt.code is WeightCode.FP8:
        return {f"{name}.weight": weight.codes.contiguous().view(torch.float8_e4m3fn), **tensors}
    q = whole_groups(name, weight)
    if version_of(fmt) == INT:
        tensors[f"{name}.weight"] = q.contiguous()  # int8 [out, in]
        if weight.zero is not None:
            tensors[f"{name}.weight_zero_point"] = weight.zero.contiguous()  # int8 [out, groups]
        return tensors
    tensors[f"{name}.weight_packed"] = pack_words(offset(q, bits), bits)  # int32 [out, words of in]
    tensors[f"{name}.weight_shape"] = torch.tensor([weight.out_features, weight.in_features])  # int64
    if weight.zero is not None:
        zero = pack_words(offset(weight.zero, bits).T, bits)  # [groups, words of out]
        tensors[f"{name}.weight_zero_point"] = zero.T.contiguous()
    return tensors


def read_linear(layer: LayerScheme, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    fmt = layer.fmt
    if fmt.code is WeightCode.FP8:
        codes = take_matrix(tensors, f"{name}.weight", (torch.float8_e4m3fn,)).view(torch.uint8)
        if ((codes & _NAN_BITS) == _NAN_BITS).any():
            raise ModelError(f"tensor {name}.weight holds NaN; download or copy the checkpoint again")
        scale = take_scale(tensors, f"{name}.weight_scale", [codes.shape[0], 1])
        return QuantizedWeight(fmt=fmt, codes=codes, scale=scale)
    if layer.version == PACKED:
        q = _packed_codes(fmt, name, tensors)
    else:
        q = take_matrix(tensors, f"{name}.weight", (torch.int8,))
        _check_range(f"{name}.weight", q, fmt.code.bits)
    out, inputs = q.shape
    groups = fmt.groups(inputs)
    scale = take_scale(tensors, f"{name}.weight_scale", [out, groups])
    zero = None if fmt.symmetric else _zero(layer, name, tensors, (out, groups))
    order = None
    if "weight_g_idx" in layer.suffixes:
        order = take_order(tensors, f"{name}.weight_g_idx", inputs, groups)
        q = q if order is None else q[:, order]
    return QuantizedWeight.pack(fmt, q, scale, zero, order)


def stored_shape(layer: LayerScheme, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    if layer.version == PACKED:
        out, inputs = take(tensors, f"{name}.weight_shape", (torch.int64, torch.int32), [2]).tolist()
        return out, inputs
    out, inputs = tensors[f"{name}.weight"].shape
    return out, inputs


def _packed_codes(fmt: WeightFormat, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    words = take_matrix(tensors, f"{name}.weight_packed", (torch.int32,))
    shape = take(tensors, f"{name}.weight_shape", (torch.int64, torch.int32), [2]).tolist()
    bits = fmt.code.bits
    if shape[0] != words.shape[0] or shape[1] < 1 or num_words(shape[1], bits) != words.shape[1]:
        raise ModelError(
            f"tensor {name}.weight_shape says {shape}, but {name}.weight_packed of {bits} bits has shape "
            f"{list(words.shape)}; versions of compressed-tensors before 0.14 may have padded 3-bit words"
        )
    if shape[1] % 2 and bits < 8:
        raise ModelError(f"tensor {name}.weight_shape says {shape}; kvq reads an even number of inputs")
    return signed(unpack_words(words, bits, shape[1]), bits)


def _zero(layer: LayerScheme, name: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    name, bits = f"{name}.weight_zero_point", layer.fmt.code.bits
    if layer.version == PACKED:
        words = take(tensors, name, (torch.int32,), [num_words(shape[0], bits), shape[1]])
        return signed(unpack_words(words.T, bits, shape[0]), bits).T.contiguous()
    zero = take(tensors, name, (torch.int8,), shape)
    _check_range(name, zero, bits)
    return zero


def _check_range(name: str, q: Tensor, bits: int) -> None:
    low, high, half = int(q.min()), int(q.max()), 1 << (bits - 1)
    if low < -half or high >= half:
        raise ModelError(f"tensor {name} must hold -{half} to {half - 1}, got {low} to {high}")
