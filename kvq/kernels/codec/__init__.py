"""Encoders and decoders of KV formats on tensors."""

from kvq.kernels.codec.hadamard import hadamard_block, rotate, rotate_by_product
from kvq.kernels.codec.reference import CODE_DTYPES, decode, encode

__all__ = ["CODE_DTYPES", "decode", "encode", "hadamard_block", "rotate", "rotate_by_product"]
