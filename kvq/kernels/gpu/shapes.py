"""Tile shapes of the attention kernels, from a checked-in table that `kvq bench tune` writes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.formats import Grouped
from kvq.kernels.paged import PagedKV
from kvq.kernels.spec import Device

DECODE_ROWS = 16  # query rows of a tile of a short sequence: the least that tensor cores take
MOST_DECODE_ROWS = 64  # of one sequence and KV head: several such tiles, for drafts and many query heads
TABLE = Path(__file__).with_name("shapes.json")
FP32 = "fp32"  # queries or inputs, for which nothing is tuned
_PLAIN = ("bf16/bf16", "fp16/fp16")  # formats whose codes are multiplied as they are
_WARPS = 48  # of all programs of a step per multiprocessor: 12 programs, whether 2, 3 or 4 fit at once
_LEAST_SPLIT = 256  # keys of a tile of DECODE_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class TileShape:
    """How one kernel is cut."""

    rows: int  # query rows: (new token, query head of the KV head)
    keys: int
    warps: int
    stages: int


def decode_shape(kv: PagedKV, q: Tensor) -> TileShape:
    """The shape for tiles of at most `DECODE_ROWS` rows."""
    return _kept("decode", kv, q)


def extend_shape(kv: PagedKV, q: Tensor) -> TileShape:
    """The shape for tiles of many rows."""
    return _kept("extend", kv, q)


def pieces(shape: TileShape, kv_heads: int, device: torch.device) -> int:
    """Pieces of work for one KV head, so that every multiprocessor has several programs."""
    return -(-multiprocessors(device) * _WARPS // (shape.warps * kv_heads))


def least_split(shape: TileShape) -> int:
    """The fewest keys worth a program of their own, a multiple of the tile: what a part's rows cost, written
    and merged, must be little beside them."""
    return max(1, _LEAST_SPLIT * shape.rows // (DECODE_ROWS * shape.keys)) * shape.keys


def table_key(kind: str, fmt: str, size: int, device: str) -> str:
    """How an entry of the table is named; `size`: the head dimension, or of "linear" the class of rows."""
    return f"{kind} {fmt} {size} {device}"


def entry(key: str) -> dict[str, int] | None:
    """What the table has under that key."""
    return _table().entries.get(key)


def sizes_for(kind: str, fmt: str, size: int, device: str) -> dict[str, int] | None:
    """The table's entry for this device, else for any."""
    return entry(table_key(kind, fmt, size, device)) or entry(table_key(kind, fmt, size, "any"))


@contextmanager
def using(key: str, shape: Any) -> Iterator[None]:
    """Let one entry of the table be another (a dataclass of a kernel's sizes), for tuning."""
    table = _table()
    before = table.entries
    table.entries, table.changes = {**before, key: asdict(shape)}, table.changes + 1
    try:
        yield
    finally:
        table.entries, table.changes = before, table.changes + 1


def changes() -> int:
    """How often entries were replaced: whoever keeps a shape keeps it for one such number."""
    return _table().changes


def _kept(kind: str, kv: PagedKV, q: Tensor) -> TileShape:
    name = TileShape, kind, target(q), changes()
    if name not in kv.kept:
        kv.kept[name] = _shape(kind, format_name(kv), _head_dim(kv), target(q), _groups(kv))
    shape: TileShape = kv.kept[name]
    return shape


def _shape(kind: str, fmt: str, head_dim: int, device: str, groups: int) -> TileShape:
    """The table's entry for this device, else for any, else for the format on any device."""
    if (sizes := sizes_for(kind, fmt, head_dim, device)) is not None:
        return TileShape(**sizes)
    if device == "interpreter":
        return TileShape(rows=DECODE_ROWS if kind == "decode" else 32, keys=32, warps=1, stages=1)
    if device == FP32:  # products in fp32 take registers and memory
        return TileShape(rows=DECODE_ROWS if kind == "decode" else 32, keys=16, warps=4, stages=2)
    if device.startswith("gfx"):
        return _amd_shape(kind, device)
    # Every group has sums per key of its own in registers.
    keys, stages = (64, 3) if head_dim <= 128 and groups <= 2 else (32, 2)
    if kind == "decode":
        return TileShape(rows=DECODE_ROWS, keys=keys, warps=4, stages=stages)
    # Where products go to tensor memory, Triton can't pipeline the assembly that converts codes.
    is_converted = device.startswith("sm10") and fmt not in _PLAIN
    return TileShape(rows=64, keys=keys, warps=8, stages=1 if is_converted else 2)


def _amd_shape(kind: str, device: str) -> TileShape:
    """What spills no registers, or the fewest: nothing is copied asynchronously, so more stages are more of
    them. gfx9 has 64 lanes a warp, others 32."""
    keys = 32 if device.startswith("gfx9") else 16
    if kind == "decode":
        return TileShape(rows=DECODE_ROWS, keys=keys, warps=2, stages=1)
    return TileShape(rows=64, keys=keys, warps=4, stages=1)


@dataclass
class _Table:
    entries: dict[str, dict[str, int]]
    changes: int = 0


@lru_cache(maxsize=1)
def _table() -> _Table:
    return _Table(json.loads(TABLE.read_text())["shapes"])


def format_name(kv: PagedKV) -> str:
    """K and V codes and groups, as `int4_g64/int8`; rotation doesn't change what a tile costs."""
    names = []
    for fmt in (kv.formats.k, kv.formats.v):
        group = f"_g{fmt.scale.group_size}" if isinstance(fmt.scale, Grouped) else ""
        names.append(f"{fmt.code.name}{group}")
    return "/".join(names)


def _groups(kv: PagedKV) -> int:
    """Groups of a token row, of K or V, whichever has more."""
    dims = (kv.formats.k_head_dim, kv.formats.v_head_dim)
    formats = zip((kv.formats.k, kv.formats.v), dims, strict=True)
    return max(dim // f.scale.group_size if isinstance(f.scale, Grouped) else 1 for f, dim in formats)


def target(x: Tensor) -> str:
    """The device, or that what is multiplied is fp32."""
    is_fp32 = x.dtype is torch.float32 and x.device.type != "cpu"
    return FP32 if is_fp32 else device_name(x.device)


def _head_dim(kv: PagedKV) -> int:
    return max(kv.formats.k_head_dim, kv.formats.v_head_dim)


@lru_cache(maxsize=8)
def device_name(device: torch.device) -> str:
    """How the table calls a device: by its architecture, as `sm90` or `gfx942`."""
    return "interpreter" if device.type == "cpu" else Device.of(device).architecture


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter is one."""
    if device.type == "cpu":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
