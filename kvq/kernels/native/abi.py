"""Declarations of `abi.h` in ctypes: numbers, structures, and the arguments of each kernel.

Structures used by several kernels are filled from tensors here.
"""

import ctypes
import re
from ctypes import addressof, c_int32
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats import Code, Grouped, KVFormat, mean_format
from kvq.kernels.paged import PagedKV, PagedRows, SequenceBatch

_TEXT = re.sub(r"//.*", "", Path(__file__).with_name("abi.h").read_text(encoding="utf-8"))
NUMBERS: dict[str, int] = {  # of every enumeration
    name.strip(): number
    for names in re.findall(r"enum \w+ \{(.*?)\}", _TEXT, re.DOTALL)
    for number, name in enumerate(names.split(","))
}
_TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def _type(declared: str) -> Any:
    """Return the ctypes type of a field or argument; every pointer is an address."""
    return ctypes.c_void_p if "*" in declared else _TYPES[declared.split()[0]]


def _structure(name: str, fields: str) -> Any:  # D90: abi.h is read, not repeated
    declared = [
        (re.findall(r"\w+", field)[-1], _type(line))
        for line in fields.split(";")[:-1]
        for field in line.split(",")
    ]
    return type(name, (ctypes.Structure,), {"_fields_": declared})


for _name, _fields in re.findall(r"struct (\w+) \{(.*?)\};", _TEXT, re.DOTALL):
    _TYPES[_name] = _structure(_name, _fields)


def struct(name: str) -> Any:
    """Return the ctypes class of a structure; call `struct(...)(field=...)` to create an instance."""
    return _TYPES[name]


def _argument(declared: str) -> Any:
    """Return the ctypes type of an argument: a structure is passed by reference, other memory by address."""
    pointed = re.search(r"Kvq\w+(?=\*)", declared)
    return ctypes.POINTER(_TYPES[pointed[0]]) if pointed else _type(declared)


KERNELS: dict[str, list[Any]] = {  # the types of their arguments
    name: [_argument(argument) for argument in arguments.split(",")]
    for name, arguments in re.findall(r"KVQ_KERNEL\((\w+)\)\((.*?)\);", _TEXT, re.DOTALL)
}

Layer, Rows, Dense, Batch = (struct(f"Kvq{name}") for name in ("Layer", "Rows", "Dense", "Batch"))
DTYPES = {
    torch.float32: NUMBERS["KVQ_FP32"],
    torch.bfloat16: NUMBERS["KVQ_BF16"],
    torch.float16: NUMBERS["KVQ_FP16"],
}


def layer_of(kv: PagedKV) -> Any:
    """Return the KvqLayer structure of a layer's blocks, cached for the lifetime of `kv`."""
    if Layer not in kv.kept:
        num_blocks, kv_heads = kv.k.codes.shape[:2]
        dims = kv.formats.k_head_dim, kv.formats.v_head_dim
        means = kv.kept[Rows] = [_means(rows, dim) for rows, dim in zip((kv.k, kv.v), dims, strict=True)]
        kv.kept[Layer] = Layer(
            k=_rows(kv.k, kv.formats.k, kv.formats.k_head_dim, kv.formats.k_clip, means[0]),
            v=_rows(kv.v, kv.formats.v, kv.formats.v_head_dim, kv.formats.v_clip, means[1]),
            num_blocks=num_blocks,
            kv_heads=kv_heads,
            block_size=kv.block_size,
        )
    return kv.kept[Layer]


def check_shape(name: str, x: Tensor, heads: int, dim: int) -> None:
    """Raise ConfigError unless `x` is [tokens, heads, dim]: compiled code would read past its end."""
    if x.dim() != 3 or x.shape[1:] != (heads, dim):
        raise ConfigError(f"{name} must be [tokens, {heads}, {dim}], got {list(x.shape)}")


def dense_of(x: Tensor) -> tuple[Any, Tensor]:
    """Return `x` [tokens, heads, dim] as a KvqDense, and its memory: `x` or a contiguous copy."""
    if x.stride(2) != 1 or x.dtype not in DTYPES:
        x = x.contiguous() if x.dtype in DTYPES else x.float().contiguous()
    size = x.element_size()
    return Dense(x.data_ptr(), x.stride(0) * size, x.stride(1) * size, DTYPES[x.dtype]), x


def rows_of(x: Tensor) -> tuple[int, int]:
    """Return a matrix in the form that kernels take: its address, and the bytes between rows."""
    return x.data_ptr(), x.stride(0) * x.element_size()


def checked_rows(x: Tensor, features: int) -> Tensor:
    """Return `x` [rows, features], or a copy of it with contiguous rows.

    Raises:
        ConfigError: the shape or dtype is not supported: compiled code would read past its end.
    """
    if x.dim() != 2 or x.shape[1] != features or x.dtype not in DTYPES:
        raise ConfigError(
            f"inputs must be fp32, bf16 or fp16 [rows, {features}], got {x.dtype} {list(x.shape)}"
        )
    return x if x.stride(1) == 1 else x.contiguous()


def batch_of(batch: SequenceBatch) -> tuple[Any, Tensor]:
    """Return the sequences of a step as a KvqBatch, and the tables to which it points."""
    lens = batch.kept.get(Batch)
    if lens is None:
        array = c_int32 * len(batch.query_lens)
        lens = batch.kept[Batch] = (array(*batch.query_lens), array(*batch.context_lens))
    tables = entries_of(batch.tables)
    width, sequences = tables.shape[1], len(batch.query_lens)
    found = Batch(*map(addressof, lens), tables.data_ptr(), tables.stride(0), width, sequences)
    return found, tables


def entries_of(tables: Tensor) -> Tensor:
    """Return `tables` [sequences, blocks] as int32 with contiguous rows, copied only if necessary.

    Numbers too large for int32 are replaced by numbers too large for any pool.
    """
    if tables.dtype is not torch.int32:
        tables = tables.clamp(-1, torch.iinfo(torch.int32).max).int()
    return tables if tables.stride(1) == 1 else tables.contiguous()


def _number_of(code: Code) -> int:
    """Return the KvqCode number of a code."""
    name = code.name if not code.is_grouped else "int4" if code.bits == 4 else "grouped"
    return NUMBERS[f"KVQ_{name.upper()}"]


def _rows(rows: PagedRows, fmt: KVFormat, dim: int, clip: float = 1.0, means: Any = None) -> Any:
    assert rows.codes.stride(3) == 1, "token rows are contiguous"
    codes_block, codes_head, codes_slot = _byte_strides(rows.codes)
    scales = rows.scales
    block, head, slot = (0, 0, 0) if scales is None else _byte_strides(scales)
    return Rows(
        codes=rows.codes.data_ptr(),
        codes_block=codes_block,
        codes_head=codes_head,
        codes_slot=codes_slot,
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
        cut=(1 - clip * fmt.span) / 2,
        narrow=fmt.is_narrow,
        channels=fmt.is_per_channel,
        means=None if means is None else addressof(means),
    )


def _means(rows: PagedRows, dim: int) -> Any:
    """Return block means as KvqRows with one row per block."""
    if rows.means is None:
        return None
    fmt = mean_format(dim)
    codes, scales = rows.means[:, :, None].split([fmt.code_bytes(dim), fmt.scale_bytes(dim)], dim=-1)
    return _rows(PagedRows(codes=codes, scales=scales, static_scale=None), fmt, dim)


def _byte_strides(x: Tensor) -> tuple[int, ...]:
    return tuple(stride * x.element_size() for stride in x.stride()[:-1])
