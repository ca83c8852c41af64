"""Tensors of the GPTQ format: qweight along inputs, qzeros along outputs, scales, and g_idx.

Source: AutoGPTQ 0.7, `auto_gptq/nn_modules/qlinear`; GPTQModel, `gptqmodel/utils/model.py` (v1 and v2).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvq.errors import ConfigError, ModelError
from kvq.formats.checkpoints.fields import WHERE
from kvq.formats.checkpoints.flat_config import V1, V2
from kvq.formats.checkpoints.scheme import LayerScheme
from kvq.kernels.weight import QuantizedWeight
from kvq.weights.files.tensors import take, take_matrix, take_order, take_scale
from kvq.weights.files.words import (
    WORD_BITS,
    check_fp16_scales,
    num_words,
    offset,
    own_order,
    pack_words,
    signed,
    unpack_words,
)


def pack_linear(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of one layer in GPTQ version 1.

    Raises:
        ConfigError: scales aren't fp16, or inputs or outputs don't fill whole words.
    """
    bits, out, inputs = weight.fmt.code.bits, weight.out_features, weight.in_features
    for side, count in (("inputs", inputs), ("outputs", out)):
        if count * bits % WORD_BITS:
            fits = next(n for n in (4, 8, 16, 32) if n * bits % WORD_BITS == 0)
            raise ConfigError(f"{name}: GPTQ of {bits} bits needs a multiple of {fits} {side}, got {count}")
    check_fp16_scales(name, weight, "GPTQ")
    q, index = own_order(weight)
    zeros = torch.full(
        (weight.scale.shape[1], out), (1 << (bits - 1)) - 1, dtype=torch.uint8, device=q.device
    )
    return {
        f"{name}.qweight": pack_words(offset(q, bits), bits).T.contiguous(),  # [words of in, out]
        f"{name}.qzeros": pack_words(zeros, bits),  # [groups, words of out]
        f"{name}.scales": weight.scale.T.contiguous(),  # [groups, out]
        f"{name}.g_idx": index,  # [in]
    }


def read_linear(layer: LayerScheme, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    fmt, bits = layer.fmt, layer.fmt.code.bits
    words = take_matrix(tensors, f"{name}.qweight", (torch.int32,))  # [words of in, out]
    out = words.shape[1]
    if words.shape[0] * WORD_BITS % bits or out * bits % WORD_BITS:
        raise ModelError(f"tensor {name}.qweight of shape {list(words.shape)} can't hold {bits}-bit codes")
    inputs = words.shape[0] * WORD_BITS // bits
    groups = fmt.groups(inputs)
    scale = take_scale(tensors, f"{name}.scales", [groups, out]).T.contiguous()
    zero = _zeros(layer, f"{name}.qzeros", tensors, (groups, out))
    order = take_order(tensors, f"{name}.g_idx", inputs, groups)
    q = signed(unpack_words(words.T, bits, inputs), bits)
    return QuantizedWeight.pack(fmt, q if order is None else q[:, order], scale, zero, order)


def stored_shape(layer: LayerScheme, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    words, out = tensors[f"{name}.qweight"].shape
    return out, words * WORD_BITS // layer.fmt.code.bits


def _zeros(
    layer: LayerScheme, name: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]
) -> Tensor | None:
    """Return zero points, int8 [out, groups], or None for symmetric formats if all stored ones are 0."""
    bits = layer.fmt.code.bits
    words = take(tensors, name, (torch.int32,), [shape[0], num_words(shape[1], bits)])
    stored = unpack_words(words, bits, shape[1])  # [groups, out]
    if layer.version == V1:
        stored = (stored + 1) & ((1 << bits) - 1)
    zero = signed(stored, bits)
    if (zero == (1 if layer.version == V1 else -1)).all():  # 0 in the other version
        other = V2 if layer.version == V1 else V1
        raise ModelError(
            f"tensor {name} holds the zero points of symmetric weights as checkpoint_format {other!r} has "
            f"them, but {WHERE} says, or leaves it at, {layer.version!r}; say checkpoint_format: {other!r}"
        )
    if not layer.fmt.symmetric:
        return zero.T.contiguous()
    if zero.any():
        raise ModelError(f"tensor {name} holds zero points, but {WHERE} says sym: true; set it to false")
    return None
