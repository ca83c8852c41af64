"""Tile shapes of the attention kernels, from a checked-in table that `kvq bench tune` writes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.formats import CODES, Grouped, KVFormat, mean_format
from kvq.formats.recipe import LayerFormats
from kvq.kernels.paged import PagedKV
from kvq.kernels.spec import Device

# D132: decode and extend differ in rows of a tile
DECODE_ROWS = 16  # query rows of a tile of a short sequence: the minimum for tensor cores
MOST_DECODE_ROWS = 64  # of one sequence and KV head: several such tiles, for drafts and many query heads
TABLE = Path(__file__).with_name("shapes.json")  # D133: tiles as timed on an H200, also elsewhere
_MOST_BLOCK = 64  # tokens: larger blocks are treated like these
_LEAST_WORDS = 16  # of two bytes that a product sums over
_LEAST_KEYS = 16  # of a tile: what V's product sums over
_MOST_RUN = 32  # bytes of codes in two planes: the two-byte words that a product sums over
ORIGIN = "from"  # of an entry: "timed" on a GPU, or "counted" in code compiled without one
FP32 = "fp32"  # queries or inputs, for which nothing is tuned
# Warps of all programs of a step per multiprocessor: 12 fit at once with _REGISTERS, and one round was the
# fastest on an H200. With more registers, 8 fit; they were timed in three rounds only.
_WARPS, _REGISTERS, _OTHER_WARPS = 12, 168, 24
_LEAST_SPLIT = 256  # keys of a tile of DECODE_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class TileShape:
    """Sizes of a kernel's tile, and its launch options."""

    rows: int  # query rows: (new token, query head of the KV head)
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # maximum per thread; None: as many as the compiler takes

    def options(self) -> dict[str, int]:
        """Return the launch options."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


def shape_of(kind: str, kv: PagedKV, q: Tensor) -> TileShape:
    """Return the shape for "decode" (tiles of at most `DECODE_ROWS` rows) or "extend" (tiles of more rows),
    or likewise for "latent decode" or "latent extend"."""
    name = TileShape, kind, target(q), changes()
    if name not in kv.kept:
        kv.kept[name] = shape_for(kind, kv.formats, target(q), kv.block_size)
    shape: TileShape = kv.kept[name]
    return shape


def folded_keys(shape: TileShape) -> int:
    """Return the number of keys with separate sums: 8, the columns of a product, for each decode warp."""
    return min(8 * (shape.warps if shape.rows == DECODE_ROWS else 1), shape.keys)


def pieces(shape: TileShape, kv_heads: int, device: torch.device) -> int:  # D136
    """Return the number of pieces of work per KV head that gives every multiprocessor several programs."""
    fits = shape.registers is not None and shape.registers <= _REGISTERS
    warps = multiprocessors(device) * (_WARPS if fits else _OTHER_WARPS)
    return -(-warps // (shape.warps * kv_heads))


def least_split(shape: TileShape) -> int:
    """Return the minimum number of keys worth a program, in whole tiles; storing a part then costs little."""
    return max(1, _LEAST_SPLIT * shape.rows // (DECODE_ROWS * shape.keys)) * shape.keys


def table_key(kind: str, fmt: str, size: int, device: str, block_size: int | None = None) -> str:
    """Return the name of a table entry; `size`: head dimension or, for "linear", the class of rows.

    Entries for attention name the block size to which they apply, or none if they apply to all; 64 stands for
    all its multiples, and any other number for the sizes whose largest power-of-two divisor it is.
    """
    blocks = "" if block_size is None else f" blocks {gcd(block_size, _MOST_BLOCK)}"
    return f"{kind} {fmt} {size} {device}{blocks}"


def entries() -> dict[str, dict[str, int]]:
    """Return all entries of the table."""
    return _table().entries


def sizes_for(
    kind: str, fmt: str, size: int, device: str, block_size: int | None = None
) -> dict[str, int] | None:
    """Return the entry for this device and block size, else for all block sizes, else for any device."""
    keys = (
        *([] if block_size is None else [table_key(kind, fmt, size, device, block_size)]),
        *(table_key(kind, fmt, size, name) for name in (device, "any")),
    )
    return next((found for key in keys if (found := entries().get(key)) is not None), None)


@contextmanager
def using(key: str, shape: Any) -> Iterator[None]:
    """Temporarily replace a table entry with the sizes in `shape`, a kernel's dataclass, for tuning."""
    table = _table()
    before = table.entries
    table.entries, table.changes = {**before, key: asdict(shape)}, table.changes + 1
    try:
        yield
    finally:
        table.entries, table.changes = before, table.changes + 1


def changes() -> int:
    """Return how often entries were replaced; cached shapes are valid while this number is unchanged."""
    return _table().changes


def shape_for(kind: str, formats: LayerFormats, device: str, block_size: int) -> TileShape:
    """Return the shape for "decode" or "extend" on devices with the name `device`."""
    if kind == "decode" and (formats.k.mean or formats.v.mean):
        shape = shape_for(kind, _without_means(formats), device, block_size)
        if takes_means_apart(formats, shape, block_size):
            return shape
    if kind == "extend" and device == "sm90" and _extends_wrongly(formats):
        kind = "decode"
    dim, run = max(formats.k_head_dim, formats.v_head_dim), _shortest_run(formats, block_size)
    shape = _shape(kind, format_name(formats), dim, device, run, block_size)
    keys = gcd(block_size, shape.keys)
    # Per-channel scales are folded into the queries, so a tile should lie in one block.
    return replace(shape, keys=keys) if formats.k.is_per_channel and keys >= _LEAST_KEYS else shape


def tiled_as(kind: str, formats: LayerFormats, device: str, block_size: int) -> str:
    """Return the format name under which the table stores the tiles of `formats`."""
    shape = shape_for(kind, formats, device, block_size)
    is_apart = kind == "decode" and takes_means_apart(formats, shape, block_size)
    return format_name(_without_means(formats) if is_apart else formats)


def _without_means(formats: LayerFormats) -> LayerFormats:
    return replace(formats, k=replace(formats.k, mean=False), v=replace(formats.v, mean=False))


def takes_means_apart(formats: LayerFormats, shape: TileShape, block_size: int) -> bool:
    """Return True if a decode tile adds the means of all blocks outside its loop over keys.

    The tile must lie in one block; means and their rows are read as words, in runs that fill columns.
    """
    parts = (formats.k, formats.k_head_dim), (formats.v, formats.v_head_dim)
    found = [(fmt, dim) for fmt, dim in parts if fmt.mean]
    means = [run_bytes(mean_format(dim), dim) // 2 for _, dim in found]
    has_words = all(run_bytes(fmt, dim) for fmt, dim in found)
    fills = all(words >= _LEAST_WORDS and words & (words - 1) == 0 for words in means)
    return bool(found) and has_words and fills and block_size % shape.keys == 0


def _extends_wrongly(formats: LayerFormats) -> bool:  # D140: wrong on Hopper, not understood: refused
    """Return True if tiles of 64 rows may return NaN, as observed on an H200 with Triton 3.6.0.

    Tiles of 16 rows are correct; the cause is unknown. NaN occurred with V in INT4 and K in INT8 or FP8; all
    grouped V is read like INT4.
    """
    return formats.v.code.is_grouped and formats.k.code is not formats.v.code


def _shape(kind: str, fmt: str, head_dim: int, device: str, run: int, block_size: int) -> TileShape:
    """Return the table's entry for this device or for any device, or else a shape computed for the format."""
    if (sizes := sizes_for(kind, fmt, head_dim, device, block_size)) is not None:
        return TileShape(**sizes)
    decodes = kind.endswith("decode")
    if device == "interpreter":
        return TileShape(rows=DECODE_ROWS if decodes else 32, keys=32, warps=1, stages=1)
    if kind.startswith("latent"):
        return _latent_shape(decodes, device, run, block_size)
    if device == FP32:  # products in fp32 take registers and memory
        return TileShape(rows=DECODE_ROWS if decodes else 32, keys=16, warps=4, stages=2)
    if device.startswith("gfx"):
        return _amd_shape(kind, device)
    shape = _nvidia_shape(kind, head_dim, run, block_size)
    is_crowded = _fills_registers(fmt)
    if is_crowded:
        shape = replace(shape, registers=None)
    if kind == "extend" and device.startswith("sm10"):  # products go to tensor memory: nothing is pipelined
        shape = replace(shape, stages=1, keys=min(shape.keys, 32 if is_crowded else shape.keys))
    return shape


def _fills_registers(fmt: str) -> bool:
    """Return True if products of means, two-plane words or per-channel scales need so many registers that a
    limit of 168 would spill some."""
    codes = (CODES[part.partition("_")[0]] for part in fmt.split("/"))
    return "_mean" in fmt or "_per_channel" in fmt or any(len(code.planes) > 1 for code in codes)


def _nvidia_shape(kind: str, head_dim: int, run: int, block_size: int) -> TileShape:  # D135
    """Return the shape with the fewest instructions per key without spilling or, for decode with heads of
    128, the fastest shape on an H200. Counts are in benchmarks/results/gpu-counted.md.

    `run`: number of bytes of a row that are read together; 0 if rows are decoded bit by bit in registers.
    Five stages are two tiles in shared memory, since a table entry is read two stages before its rows.
    """
    if run == 0:
        rows, warps = (DECODE_ROWS, 4) if kind == "decode" else (64, 8)
        return TileShape(rows=rows, keys=32, warps=warps, stages=2)
    if kind == "extend":
        return TileShape(rows=64, keys=64 if head_dim <= 128 and run > 32 else 32, warps=4, stages=5)
    if head_dim > 192:
        return TileShape(rows=DECODE_ROWS, keys=32, warps=2, stages=5)
    # Products of short runs have too few columns for two warps; runs of 64 bytes are faster with one, too.
    # Blocks of 32 tokens contain a whole tile of one warp, which pays if rows fill it.
    whole = block_size % 64 != 0 and block_size % 32 == 0 and head_dim in (32, 64, 128)
    keys, warps = (32, 1) if run <= 32 or whole or (run <= 64 and head_dim == 128) else (64, 2)
    # Conversions keep a multiprocessor busy with 12 warps instead of 8, for half an instruction more per key.
    registers = 168 if run <= 64 and head_dim <= 128 else None
    return TileShape(rows=DECODE_ROWS, keys=keys, warps=warps, stages=5, registers=registers)


def _latent_shape(decodes: bool, device: str, run: int, block_size: int) -> TileShape:
    """Return a shape (counted, not timed). Sums of latents use the registers that more rows would need."""
    if device == FP32:
        return TileShape(rows=DECODE_ROWS, keys=16, warps=4, stages=2 if run else 1)
    if run == 0 or device.startswith("gfx"):
        return TileShape(rows=DECODE_ROWS, keys=32, warps=4, stages=1)
    has_room = device.startswith(("sm9", "sm10"))  # in shared memory
    keys = 64 if has_room and block_size % 64 == 0 else 32
    if decodes:
        return TileShape(rows=DECODE_ROWS, keys=keys, warps=keys // 8, stages=3 if device == "sm80" else 5)
    return TileShape(rows=64 if device == "sm90" else 32, keys=keys, warps=8, stages=2)


def _amd_shape(kind: str, device: str) -> TileShape:
    """Return the shape that spills the fewest registers: copies aren't asynchronous, so stages take
    registers. gfx9 has 64 lanes per warp, other GPUs 32."""
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
    kept = json.loads(TABLE.read_text())["shapes"]
    return _Table({key: {x: n for x, n in own.items() if x != ORIGIN} for key, own in kept.items()})


def format_name(formats: LayerFormats) -> str:
    """Return codes, groups and scale kinds of K and V, as `int4_g32_s8/int8`; rotation costs the same."""
    names = []
    for fmt in (formats.k, formats.v):
        group = f"_g{fmt.scale.group_size}" if isinstance(fmt.scale, Grouped) else ""
        ends = "_s8" * fmt.is_narrow + "_mean" * fmt.mean + "_per_channel" * fmt.is_per_channel
        names.append(f"{fmt.code.name}{group}{ends}")
    return "/".join(names)


def _shortest_run(formats: LayerFormats, block_size: int) -> int:
    """Return the fewest bytes that share a scale in K's or V's rows; 0 if rows aren't read as words."""
    parts = (formats.k, formats.k_head_dim), (formats.v, formats.v_head_dim)
    return 0 if formats.v.is_per_channel else min(_run(fmt, dim, block_size) for fmt, dim in parts)


def _run(fmt: KVFormat, dim: int, block_size: int) -> int:
    # Tiles of rows with means are read as words if they are INT4 and each lies in one block.
    is_read = not fmt.mean or (fmt.code.bits == 4 and block_size % _MOST_BLOCK == 0)
    is_read = is_read and not (fmt.is_per_channel and block_size % _LEAST_KEYS)
    return _scaled_bytes(fmt, dim) if is_read and run_bytes(fmt, dim) else 0


def _scaled_bytes(fmt: KVFormat, dim: int) -> int:
    """Return the number of bytes of a row, or of its first plane, that share one scale in every part."""
    row = dim * fmt.code.planes[0] // 8
    return min(fmt.scale.group_size, row) if isinstance(fmt.scale, Grouped) else row


def run_bytes(fmt: KVFormat, dim: int) -> int:
    """Return the number of bytes of a row that attention reads together as words: all or, for grouped codes,
    those of one group in every part of the first plane, or fewer with two planes; 0 if words don't fit.

    A place in the bytes of the second plane has the bits for `piece` bytes of the first plane.
    """
    scaled = _scaled_bytes(fmt, dim)
    if fmt.is_per_channel:
        return _channel_run(fmt, dim)
    if not isinstance(fmt.scale, Grouped):
        return scaled
    first, *others = fmt.code.planes
    row = dim * first // 8
    run = min(scaled, _MOST_RUN) if others else scaled
    piece = dim * others[0] // 8 if others else row
    has_words = first <= 4 and len(others) <= 1 and run % 2 == 0 and piece % 2 == 0
    fits = row % run == 0 and scaled % run == 0 and (piece % run == 0 or run % piece == 0)
    return run if has_words and fits else 0


def _channel_run(fmt: KVFormat, dim: int) -> int:
    """Return `run_bytes` for rows with per-channel scales, where channels that share bits form one code."""
    planes = (fmt.code.doubled if fmt.is_paired else fmt.code).planes
    row = dim * fmt.code.bits // 8 * planes[0] // sum(planes)
    run = row if len(planes) == 1 else min(row, _MOST_RUN)
    fills = dim & (dim - 1) == 0 and run >= 2 * _LEAST_WORDS and len(planes) <= 2
    return run if fills and not fmt.rotated else 0


def target(x: Tensor) -> str:
    """Return the device's name, or FP32 for products in fp32 on a GPU."""
    is_fp32 = x.dtype is torch.float32 and x.device.type != "cpu"
    return FP32 if is_fp32 else device_name(x.device)


def device_name(device: torch.device) -> str:
    """Return the table's name for a device: its architecture, such as `sm90` or `gfx942`."""
    return _facts(device)[0]


def multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors, or 1 for the interpreter."""
    return _facts(device)[1]


@lru_cache(maxsize=8)
def _facts(device: torch.device) -> tuple[str, int]:
    """Return a device's name and number of multiprocessors, which take torch microseconds to tell."""
    if device.type == "cpu":
        return "interpreter", 1
    return Device.of(device).architecture, torch.cuda.get_device_properties(device).multi_processor_count
