"""Encoders and decoders of KV formats on tensors."""

from kvq.kernels.codec.hadamard import hadamard_block, rotate, rotate_by_product
from kvq.kernels.codec.reference import code_dtype, decode, decode_means, encode, encode_block

__all__ = [
    "code_dtype", "decode", "decode_means", "encode", "encode_block", "hadamard_block", "rotate",
    "rotate_by_product",
]  # fmt: skip
