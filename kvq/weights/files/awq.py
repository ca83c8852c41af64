"""Tensors of AutoAWQ's GEMM format: qweight and qzeros, with eight reordered outputs per word, and scales.

Source: AutoAWQ 0.2.9, `awq/modules/linear/gemm.py` and `awq/utils/packing_utils.py`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvq.errors import ConfigError, ModelError
from kvq.formats.checkpoints.fields import WHERE
from kvq.formats.checkpoints.scheme import LayerScheme
from kvq.kernels.weight import QuantizedWeight
from kvq.weights.files.tensors import take, take_matrix, take_scale
from kvq.weights.files.words import check_fp16_scales, offset, pack_awq, signed, unpack_awq, whole_groups

_BITS = 4
_COLUMNS = 8  # per word


def pack_linear(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of one layer.

    Raises:
        ConfigError: scales aren't fp16, outputs don't fill words, or groups consist of scattered inputs.
    """
    if weight.out_features % _COLUMNS:
        raise ConfigError(f"{name}: AWQ needs a multiple of {_COLUMNS} outputs, got {weight.out_features}")
    check_fp16_scales(name, weight, "AWQ")
    q = whole_groups(name, weight)
    zero = torch.zeros_like(weight.scale, dtype=torch.int8) if weight.zero is None else weight.zero
    return {
        f"{name}.qweight": pack_awq(offset(q, _BITS).T.contiguous()),  # [in, out / 8]
        f"{name}.qzeros": pack_awq(offset(zero, _BITS).T.contiguous()),  # [groups, out / 8]
        f"{name}.scales": weight.scale.T.contiguous(),  # [groups, out]
    }


def read_linear(layer: LayerScheme, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    words = take_matrix(tensors, f"{name}.qweight", (torch.int32,))  # [in, out / 8]
    inputs, out = words.shape[0], words.shape[1] * _COLUMNS
    groups = layer.fmt.groups(inputs)
    scale = take_scale(tensors, f"{name}.scales", [groups, out]).T.contiguous()
    zeros = take(tensors, f"{name}.qzeros", (torch.int32,), [groups, out // _COLUMNS])
    zero = signed(unpack_awq(zeros), _BITS).T.contiguous()  # [out, groups]
    if layer.fmt.symmetric and zero.any():
        raise ModelError(
            f"tensor {name}.qzeros holds zero points, but {WHERE} says zero_point: false; "
            + (f"all are {int(zero[0, 0])}" if (zero == zero[0, 0]).all() else "set it to true")
        )
    q = signed(unpack_awq(words), _BITS).T.contiguous()
    return QuantizedWeight.pack(layer.fmt, q, scale, None if layer.fmt.symmetric else zero)


def stored_shape(layer: LayerScheme, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    inputs, words = tensors[f"{name}.qweight"].shape
    return words * _COLUMNS, inputs
