"""Encoders and decoders of KV formats on tensors."""

from kvq.kernels.codec.block import decode_means, encode_block
from kvq.kernels.codec.hadamard import hadamard_block, rotate, rotate_by_product
from kvq.kernels.codec.reference import code_dtype, decode, encode

__all__ = [
    "code_dtype",
    "decode",
    "decode_means",
    "encode",
    "encode_block",
    "hadamard_block",
    "rotate",
    "rotate_by_product",
]
