"""A plain decoder layer without its attention, in C++ for CPUs: two calls instead of eight or more."""

from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.adapters.cpu import CpuStepAdapters
from kvq.kernels.decoder.parts import DecoderParts, GatedParts
from kvq.kernels.gated.reference import COMPILED
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.abi import DTYPES, struct
from kvq.kernels.native.library import run
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.kernels.rope.cpu import MOST_DIM
from kvq.kernels.rope_write.reference import Pairs

_Norm = struct("KvqNorm")


def runs_in_cpp(parts: DecoderParts) -> bool:
    """Return True for plain layers: norms before or around, a gated MLP, RoPE on complete heads in halves."""
    heads, mlp = parts.heads, parts.mlp
    norms = parts.scale == 1.0 and parts.input_norm is not None and parts.mlp_norm is not None
    turned = heads.rotary_dim == heads.k_dim == heads.v_dim <= MOST_DIM and heads.pairs is Pairs.HALVES
    own = all(norm.weight.shape == (heads.k_dim,) for norm in heads.norms or ())
    gated = isinstance(mlp, GatedParts) and mlp.activation in COMPILED
    compiled = all(isinstance(product, CpuLinear) for product in _products(parts))
    return norms and turned and own and gated and compiled


def _products(parts: DecoderParts) -> tuple[Any, ...]:
    """Return the matrix products of a layer, including those of a gated MLP."""
    mlp = parts.mlp
    return (parts.qkv, parts.output) + ((mlp.gate_up, mlp.down) if isinstance(mlp, GatedParts) else ())


class CpuDecoder:
    """The parts of a layer before and after attention, bit-identical to its separate operations."""

    def __init__(self, parts: DecoderParts) -> None:
        """Prepare a layer from its parts.

        Raises:
            ConfigError: the parts don't match: compiled code would read past their ends.
        """
        self.parts = parts
        self._heads = heads = parts.heads
        _check(parts)
        self._qkv, self._output, gate_up, down = _products(parts)
        assert isinstance(parts.mlp, GatedParts), "checked"
        q_norm, k_norm = heads.norms or (None, None)
        self.struct = struct("KvqDecoder")(
            input_norm=_norm_struct(parts.input_norm),
            mlp_norm=_norm_struct(parts.mlp_norm),
            attention_norm=_norm_struct(parts.attention_norm),
            out_norm=_norm_struct(parts.out_norm),
            q_norm=_norm_struct(q_norm),
            k_norm=_norm_struct(k_norm),
            qkv=addressof(self._qkv.struct),
            output=addressof(self._output.struct),
            gate_up=addressof(gate_up.struct),
            down=addressof(down.struct),
            qkv_bias=None if heads.bias is None else heads.bias.data_ptr(),
            output_bias=None if parts.output_bias is None else parts.output_bias.data_ptr(),
            q_heads=heads.q_heads,
            kv_heads=heads.kv_heads,
            dim=heads.k_dim,
            activation=parts.mlp.activation,
        )
        self._dtypes = {bias.dtype for bias in (heads.bias, parts.output_bias) if bias is not None}

    def before(self, x: Tensor, cos: Tensor, sin: Tensor, adapters: CpuStepAdapters | None = None) -> Tensor:
        """Return queries, keys and values of the normalized inputs, after RoPE: [rows, total heads, dim].

        x: [rows, hidden], fp32, bf16 or fp16; cos, sin: [rows, dim] in the dtype of x.
        """
        heads, dim = self._heads, self._heads.k_dim
        x = self.rows(x, self.hidden)
        self.check_angles(x, cos, sin)
        cos, sin = cos.contiguous(), sin.contiguous()
        out = torch.empty(len(x), heads.q_heads + 2 * heads.kv_heads, dim, dtype=x.dtype)
        self._run("decoder_in", adapters, x, cos, sin, out)
        return out

    def after(self, x: Tensor, attended: Tensor, adapters: CpuStepAdapters | None = None) -> Tensor:
        """Return the layer's output [rows, hidden].

        x: the layer's inputs; attended: attention output [rows, q_heads * dim] in the same dtype.
        """
        x, attended = self.rows(x, self.hidden), self.rows(attended, self._output.in_features)
        rows = x.shape[0]
        if rows != attended.shape[0] or x.dtype != attended.dtype:
            raise ConfigError(
                f"what was attended must be {rows} rows of {x.dtype}, "
                f"got {list(attended.shape)}, {attended.dtype}"
            )
        out = torch.empty_like(x)
        self._run("decoder_out", adapters, x, attended, out)
        return out

    def _run(self, kernel: str, adapters: CpuStepAdapters | None, x: Tensor, *others: Tensor) -> None:
        pointers = (tensor.data_ptr() for tensor in (x, *others))
        own = (None, 0) if adapters is None else (adapters.struct, self.parts.index)
        run(kernel, self.struct, *own, *pointers, DTYPES[x.dtype], len(x), torch.get_num_threads())

    def check_angles(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Raise ConfigError unless `cos` and `sin` match the rows of `x` and the layer's heads."""
        for angle in (cos, sin):
            if angle.shape != (len(x), self._heads.k_dim) or angle.dtype is not x.dtype:
                raise ConfigError(
                    f"angles must be [{len(x)}, {self._heads.k_dim}] in {x.dtype}, "
                    f"got {list(angle.shape)}, {angle.dtype}"
                )

    @property
    def hidden(self) -> int:
        width: int = self._qkv.in_features
        return width

    def rows(self, x: Tensor, features: int) -> Tensor:
        """Return `x`, or a contiguous copy of it.

        Raises:
            ConfigError: the shape or dtype is not supported: compiled code would read past its end.
        """
        if x.dim() != 2 or x.shape[1] != features or x.dtype not in DTYPES or not self._dtypes <= {x.dtype}:
            raise ConfigError(
                f"a decoder layer takes fp32, bf16 or fp16 [rows, {features}], of its biases' dtype, "
                f"got {x.dtype} {list(x.shape)}"
            )
        return x.contiguous()


def _norm_struct(norm: NormWeight | None) -> Any:
    return _Norm(norm.weight.data_ptr(), norm.eps, DTYPES[norm.weight.dtype]) if norm else _Norm(None, 0, 0)


def _check(parts: DecoderParts) -> None:
    if not runs_in_cpp(parts):
        raise ConfigError("this decoder layer has parts that only its own code or Triton runs")
    qkv, output, gate_up, down = _products(parts)
    heads, hidden = parts.heads, qkv.in_features
    dim = heads.k_dim
    sizes = [
        (qkv.out_features, heads.width),
        (output.in_features, heads.q_heads * dim),
        (output.out_features, hidden),
        (gate_up.in_features, hidden),
        (gate_up.out_features, 2 * down.in_features),
        (down.out_features, hidden),
    ]
    own = parts.input_norm, parts.mlp_norm, parts.attention_norm, parts.out_norm
    norms = [(norm, hidden) for norm in own] + [(norm, dim) for norm in heads.norms or ()]
    vectors = [(norm.weight, size) for norm, size in norms if norm is not None]
    biases = [(heads.bias, heads.width), (parts.output_bias, hidden)]
    vectors += [(bias, size) for bias, size in biases if bias is not None]
    if any(found != wanted for found, wanted in sizes) or any(
        vector.shape != (size,) or vector.dtype not in DTYPES or not vector.is_contiguous()
        for vector, size in vectors
    ):
        raise ConfigError(
            f"parts of a decoder layer of {heads.q_heads} and {heads.kv_heads} heads of {dim} and {hidden} "
            f"hidden numbers don't fit each other"
        )
