"""What the compiled kernels are called with: `abi.h`, field by field, filled from tensors."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats import Code, Grouped, KVFormat
from kvq.kernels.paged import PagedKV, PagedRows, SequenceBatch

_CODES = {Code.FP32: 0, Code.BF16: 1, Code.FP16: 2, Code.FP8: 3, Code.INT8: 4}
_INT4, _GROUPED = 5, 6
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Rows(ctypes.Structure):
    """KvqRows."""

    _fields_ = (
        ("codes", c_void_p),
        ("codes_block", c_int64),
        ("codes_head", c_int64),
        ("codes_slot", c_int64),
        ("scales", c_void_p),
        ("scales_block", c_int64),
        ("scales_head", c_int64),
        ("scales_slot", c_int64),
        ("static_scales", c_void_p),
        ("code", c_int32),
        ("bits", c_int32),
        ("dim", c_int32),
        ("group_size", c_int32),
        ("rotated", c_int32),
        ("cut", c_float),
    )


class Layer(ctypes.Structure):
    """KvqLayer."""

    _fields_ = (
        ("k", Rows),
        ("v", Rows),
        ("num_blocks", c_int64),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
    )


class Dense(ctypes.Structure):
    """KvqDense."""

    _fields_ = (("data", c_void_p), ("token", c_int64), ("head", c_int64), ("code", c_int32))


class Batch(ctypes.Structure):
    """KvqBatch."""

    _fields_ = (
        ("query_lens", POINTER(c_int32)),
        ("context_lens", POINTER(c_int32)),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("table_width", c_int32),
        ("sequences", c_int32),
        ("skip_last", c_int32),
    )


class Run(ctypes.Structure):
    """KvqRun."""

    _fields_ = (("data", c_void_p), ("stride", c_int64), ("bytes", c_int64), ("num_blocks", c_int64))


class Positions(ctypes.Structure):
    """KvqPositions."""

    _fields_ = (
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("table_width", c_int32),
        ("sequences", c_int32),
        ("start", c_int32),
        ("end", c_int32),
        ("block_size", c_int32),
    )


class Gathered(ctypes.Structure):
    """KvqGathered."""

    _fields_ = (
        ("data", c_void_p),
        ("sequence", c_int64),
        ("head", c_int64),
        ("token", c_int64),
        ("code", c_int32),
    )


class Attention(ctypes.Structure):
    """KvqAttention."""

    _fields_ = (
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("q_heads", c_int32),
        ("sinks", c_void_p),
        ("threads", c_int32),
        ("exact", c_int32),
    )


class Linear(ctypes.Structure):
    """KvqLinear."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("order", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("k", c_int32),
        ("groups", c_int32),
        ("code", c_int32),
        ("scale_code", c_int32),
        ("inputs", c_int32),
    )


class Norm(ctypes.Structure):
    """KvqNorm."""

    _fields_ = (("weight", c_void_p), ("eps", c_float), ("code", c_int32))


class Decoder(ctypes.Structure):
    """KvqDecoder."""

    _fields_ = (
        ("input_norm", Norm),
        ("output_norm", Norm),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("qkv_bias", c_void_p),
        ("output_bias", c_void_p),
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("activation", c_int32),
    )


def layer_of(kv: PagedKV) -> Layer:
    """The layer's blocks; kept for as long as `kv` lives."""
    layer: Layer | None = kv.kept.get(Layer)
    if layer is None:
        num_blocks, kv_heads = kv.k.codes.shape[:2]
        layer = Layer(
            k=_rows(kv.k, kv.formats.k, kv.formats.k_head_dim, kv.formats.k_clip),
            v=_rows(kv.v, kv.formats.v, kv.formats.v_head_dim, kv.formats.v_clip),
            num_blocks=num_blocks,
            kv_heads=kv_heads,
            block_size=kv.block_size,
        )
        kv.kept[Layer] = layer
    return layer


def check_shape(name: str, x: Tensor, heads: int, dim: int) -> None:
    """Raise ConfigError unless `x` is [tokens, heads, dim]: compiled code would read past its end."""
    if x.dim() != 3 or x.shape[1:] != (heads, dim):
        raise ConfigError(f"{name} must be [tokens, {heads}, {dim}], got {list(x.shape)}")


def dense_of(x: Tensor) -> tuple[Dense, Tensor]:
    """A tensor [tokens, heads, dim] and what keeps its memory: `x`, or a copy with contiguous rows."""
    if x.stride(2) != 1 or x.dtype not in DTYPES:
        x = x.contiguous() if x.dtype in DTYPES else x.float().contiguous()
    size = x.element_size()
    return Dense(x.data_ptr(), x.stride(0) * size, x.stride(1) * size, DTYPES[x.dtype]), x


def batch_of(batch: SequenceBatch, skip_last: int) -> tuple[Batch, Tensor]:
    """The sequences of a step, and the table tensor whose memory it names."""
    lens = batch.kept.get(Batch)
    if lens is None:
        array = c_int32 * len(batch.query_lens)
        lens = batch.kept[Batch] = (array(*batch.query_lens), array(*batch.context_lens))
    tables = entries_of(batch.tables)
    found = Batch(
        *lens, tables.data_ptr(), tables.stride(0), tables.shape[1], len(batch.query_lens), skip_last
    )
    return found, tables


def entries_of(tables: Tensor) -> Tensor:
    """`tables` [sequences, blocks] as int32 with contiguous rows, copied only if it must be.

    Numbers too large for int32 stay too large for any pool.
    """
    if tables.dtype is not torch.int32:
        tables = tables.clamp(-1, torch.iinfo(torch.int32).max).int()
    return tables if tables.stride(1) == 1 else tables.contiguous()


def _number_of(code: Code) -> int:
    """KvqCode."""
    return _CODES[code] if not code.is_grouped else _INT4 if code.bits == 4 else _GROUPED


def _rows(rows: PagedRows, fmt: KVFormat, dim: int, clip: float) -> Rows:
    assert rows.codes.stride(3) == 1, "token rows are contiguous"
    code_bytes = rows.codes.element_size()
    scales = rows.scales
    block, head, slot = (0, 0, 0) if scales is None else (2 * stride for stride in scales.stride()[:3])
    return Rows(
        codes=rows.codes.data_ptr(),
        codes_block=rows.codes.stride(0) * code_bytes,
        codes_head=rows.codes.stride(1) * code_bytes,
        codes_slot=rows.codes.stride(2) * code_bytes,
        scales=None if scales is None else scales.data_ptr(),
        scales_block=block,
        scales_head=head,
        scales_slot=slot,
        static_scales=None if rows.static_scale is None else rows.static_scale.data_ptr(),
        code=_number_of(fmt.code),
        bits=fmt.code.bits,
        dim=dim,
        group_size=fmt.scale.group_size if isinstance(fmt.scale, Grouped) else 0,
        rotated=fmt.rotated,
        cut=(1 - clip) / 2,
    )
