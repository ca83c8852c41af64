"""Tile sizes of GPU products by class of rows, and the split of the inputs. Tuned in shapes.json."""

from dataclasses import dataclass, replace

import torch

from kvq.kernels.gpu import shapes
from kvq.kernels.linear.triton_pack import OUTPUTS, Kind, PackedWeight

ROW_CLASSES = (16, 32, 64)  # maximum numbers of rows; such steps are one tile high and split their inputs
MANY_ROWS = 128  # name of the class of larger steps
_LEAST_SPLIT = 512  # inputs of one part
_LARGE_SHARED = ("sm80", "sm90", "sm100", "sm103")  # more than 99 KB of shared memory for one program


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearTile:
    """Tile of one product; a step over the inputs covers one block of the weight."""

    rows: int
    outputs: int
    warps: int
    stages: int
    programs: int  # per multiprocessor, for which the inputs are split


def row_class(rows: int) -> int:
    """Return the row class of a step, within which a row's results don't depend on other rows."""
    return next((most for most in ROW_CLASSES if rows <= most), MANY_ROWS)


def fitted(weight: PackedWeight, name: str, rows: int, device: str) -> LinearTile:
    """Return the tile of format `name` for a class of rows; its outputs divide the padded outputs."""
    sizes = shapes.sizes_for("linear", name, rows, device)
    tile = LinearTile(**sizes) if sizes else _guess(rows, device, weight.kind, weight.block)
    outputs = tile.outputs
    while weight.padded_outputs % outputs:
        outputs //= 2
    assert outputs >= OUTPUTS, "weights are padded to that"
    return replace(tile, outputs=outputs)


def splits(weight: PackedWeight, tile: LinearTile, rows: int, device: torch.device) -> tuple[int, int]:
    """Return the parts of the inputs and blocks per part; with few rows, parts occupy all multiprocessors.

    Both depend only on the class of rows, so the order of a row's sums does, too.
    """
    if row_class(rows) == MANY_ROWS:
        return 1, weight.blocks
    tiles = weight.padded_outputs // tile.outputs
    wanted = max(1, shapes.multiprocessors(device) * tile.programs // tiles)
    least = max(1, _LEAST_SPLIT // weight.block)
    each = max(-(-weight.blocks // wanted), min(least, weight.blocks))
    return -(-weight.blocks // each), each


def _guess(rows: int, device: str, kind: Kind, block: int) -> LinearTile:
    """Return a tile designed for Hopper (for AMD: compiled and counted), but not yet measured."""
    if device == "interpreter":
        return LinearTile(rows=rows, outputs=64, warps=1, stages=1, programs=8)
    if device == shapes.FP32:  # products in fp32 take registers and memory
        return LinearTile(rows=min(rows, 32), outputs=64, warps=4, stages=2, programs=2)
    # A stage is 8 KB of weights at 128 outputs; smaller blocks need more of them in flight.
    step_bytes = block * (128 if kind in (Kind.INT8, Kind.FP8, Kind.ROWS) else 64)
    stages = min(6, max(4, 4 * 8192 // step_bytes))
    if device.startswith("gfx"):  # AMD: stages pass through registers
        stages = 2
    if rows <= 32:
        return LinearTile(rows=rows, outputs=128, warps=4, stages=stages, programs=4)
    if rows >= 64 and device not in _LARGE_SHARED:
        return LinearTile(rows=64, outputs=64 if rows == 64 else 128, warps=4, stages=2, programs=2)
    if rows == 64:
        return LinearTile(rows=64, outputs=128, warps=4, stages=3, programs=2)
    most = 64 if kind is Kind.Q4_K else 128  # with 128, sums and minimums would spill
    return LinearTile(rows=most, outputs=128, warps=8, stages=3, programs=1)
