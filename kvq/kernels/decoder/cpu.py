"""A plain decoder layer in C++ for CPUs, but for its attention: two calls instead of eight and more."""

from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.gated.activation import Activation, check_activation
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.abi import DTYPES, struct
from kvq.kernels.native.library import run
from kvq.kernels.rms_norm.weight import NormWeight
from kvq.kernels.rope.cpu import MOST_DIM

_Norm = struct("KvqNorm")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderWeights:
    """What a layer multiplies and adds: `qkv` for all heads; biases are of the inputs' dtype."""

    input_norm: NormWeight
    qkv: CpuLinear
    qkv_bias: Tensor | None
    head_norms: tuple[NormWeight, NormWeight] | None  # of queries and keys
    output: CpuLinear
    output_bias: Tensor | None
    output_norm: NormWeight
    gate_up: CpuLinear
    down: CpuLinear
    activation: Activation
    q_heads: int
    kv_heads: int
    dim: int  # of a head


class CpuDecoder:
    """Both halves of a layer, with the bits that its operations give one after the other."""

    def __init__(self, weights: DecoderWeights) -> None:
        """Take a layer's parts.

        Raises:
            ConfigError: they don't fit each other: compiled code would read past their ends.
        """
        self._weights = w = weights
        _check(w)
        none = _Norm(None, 0, 0)
        q_norm, k_norm = (_norm_struct(norm) for norm in w.head_norms) if w.head_norms else (none, none)
        self._struct = struct("KvqDecoder")(
            input_norm=_norm_struct(w.input_norm),
            output_norm=_norm_struct(w.output_norm),
            q_norm=q_norm,
            k_norm=k_norm,
            qkv=addressof(w.qkv.struct),
            output=addressof(w.output.struct),
            gate_up=addressof(w.gate_up.struct),
            down=addressof(w.down.struct),
            qkv_bias=None if w.qkv_bias is None else w.qkv_bias.data_ptr(),
            output_bias=None if w.output_bias is None else w.output_bias.data_ptr(),
            q_heads=w.q_heads,
            kv_heads=w.kv_heads,
            dim=w.dim,
            activation=w.activation,
        )
        self._dtypes = {bias.dtype for bias in (w.qkv_bias, w.output_bias) if bias is not None}

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of the normed inputs, queries and keys turned: [rows, heads of all, dim].

        x: [rows, hidden] of fp32, bf16 or fp16; cos, sin: [rows, dim] of its dtype.
        """
        w = self._weights
        x, cos, sin = self._rows(x, w.qkv.in_features), self._rows(cos, w.dim), self._rows(sin, w.dim)
        rows = x.shape[0]
        if not (rows == cos.shape[0] == sin.shape[0] and x.dtype == cos.dtype == sin.dtype):
            raise ConfigError(
                f"angles must be those of {rows} rows in {x.dtype}, got {list(cos.shape)}, {cos.dtype}"
            )
        out = torch.empty(rows, w.q_heads + 2 * w.kv_heads, w.dim, dtype=x.dtype)
        self._run("decoder_in", x, cos, sin, out)
        return out

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's result [rows, hidden].

        x: its inputs; attended: [rows, q_heads * dim] of the same dtype.
        """
        w = self._weights
        x, attended = self._rows(x, w.qkv.in_features), self._rows(attended, w.output.in_features)
        rows = x.shape[0]
        if rows != attended.shape[0] or x.dtype != attended.dtype:
            raise ConfigError(
                f"what was attended must be {rows} rows of {x.dtype}, "
                f"got {list(attended.shape)}, {attended.dtype}"
            )
        out = torch.empty_like(x)
        self._run("decoder_out", x, attended, out)
        return out

    def _run(self, kernel: str, x: Tensor, *others: Tensor) -> None:
        pointers = (tensor.data_ptr() for tensor in (x, *others))
        run(kernel, self._struct, *pointers, DTYPES[x.dtype], len(x), torch.get_num_threads())

    def _rows(self, x: Tensor, features: int) -> Tensor:
        if x.dim() != 2 or x.shape[1] != features or x.dtype not in DTYPES or not self._dtypes <= {x.dtype}:
            raise ConfigError(
                f"a decoder layer takes fp32, bf16 or fp16 [rows, {features}], of its biases' dtype, "
                f"got {x.dtype} {list(x.shape)}"
            )
        return x.contiguous()


def _norm_struct(norm: NormWeight) -> Any:
    return _Norm(norm.weight.data_ptr(), norm.eps, DTYPES[norm.weight.dtype])


def _check(w: DecoderWeights) -> None:
    check_activation(w.activation)
    hidden, heads, dim = w.qkv.in_features, w.q_heads + 2 * w.kv_heads, w.dim
    outputs = [
        (w.qkv.out_features, heads * dim),
        (w.output.in_features, w.q_heads * dim),
        (w.output.out_features, hidden),
        (w.gate_up.in_features, hidden),
        (w.gate_up.out_features, 2 * w.down.in_features),
        (w.down.out_features, hidden),
        (dim % 2, 0),
    ]
    norms = [(w.input_norm.weight, hidden), (w.output_norm.weight, hidden)]
    norms += [(norm.weight, dim) for norm in w.head_norms or ()]
    biases = [(w.qkv_bias, heads * dim), (w.output_bias, hidden)]
    vectors = norms + [(bias, size) for bias, size in biases if bias is not None]
    if (
        any(found != wanted for found, wanted in outputs)
        or dim > MOST_DIM
        or any(
            vector.shape != (size,) or vector.dtype not in DTYPES or not vector.is_contiguous()
            for vector, size in vectors
        )
    ):
        raise ConfigError(
            f"parts of a decoder layer of {w.q_heads} and {w.kv_heads} heads of {dim} and {hidden} hidden "
            f"numbers don't fit each other"
        )
