"""`linear_w4`, `linear_w8` and `linear_blocks` in Triton: a weight packed once, and launches of a step."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq.formats.weights import Inputs
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.launch import Bound
from kvq.kernels.gpu.support import current
from kvq.kernels.linear import tiles
from kvq.kernels.linear.tiles import LinearTile
from kvq.kernels.linear.triton_kernel import (
    add_parts_kernel,
    dequantize_kernel,
    linear_kernel,
    quantize_kernel,
)
from kvq.kernels.linear.triton_pack import Kind, PackedWeight, kind_of, pack, pack_blocks
from kvq.kernels.spec import Device
from kvq.kernels.weight import BlockWeight, QuantizedWeight

# From this many rows on, the weight is dequantized and multiplied by torch. On an H200, that adds 12 to 45 us
# to torch's product of an 8B model's layer, and at 256 rows, tiles take 30 to 150 us more than torch; see
# benchmarks/results/gpu-h200.md.
DENSE_ROWS = 192
DENSE_BYTES = 128 << 20  # of dequantized weight at a time
_SUMMED = 1024  # elements of one program that adds parts up
_QUANTIZED = 4096  # elements of a row that one step of quantizing takes
_UNITS = {Kind.FP8: 256.0, Kind.SIGNED_NIBBLES: 1 / 16, Kind.Q6_K: 1 / 4}  # factors of decoded codes


@dataclass(frozen=True, slots=True)
class _Plan:
    """Launches for one class of rows."""

    tile: LinearTile
    splits: int
    product: Bound
    sum: Bound


class TritonLinear:
    """y = x W^T with packed codes: the same results as ReferenceLinear, except for rounding.

    Fp16 and bf16 inputs are multiplied in 16 bits and summed in fp32; fp32 inputs use fp32 throughout. There
    are four classes of steps: up to 16 rows, 17 to 32, 33 to 64, and 65 to `DENSE_ROWS`. Within a class, a
    row's result doesn't depend on the other rows; in other classes, and in larger steps, the order of sums
    differs.

    No call synchronizes, and no size depends on data, so calls can be captured in a CUDA graph.
    """

    def __init__(self, weight: QuantizedWeight | BlockWeight) -> None:
        self.fmt = weight.fmt
        if isinstance(weight, BlockWeight):
            self.weight = pack_blocks(weight)
        else:
            has_fp8 = Device.of(weight.codes.device).multiplies_e4m3fn
            self.weight = pack(weight, kind_of(weight, has_fp8=has_fp8))
        self.nbytes = self.weight.nbytes
        self.code_bytes = self.weight.codes.nbytes
        self._plans: dict[Hashable, _Plan] = {}

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.weight.in_features

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return self.weight.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: [rows, in] -> [rows, out] in x's dtype."""
        device = x.device
        if device.type == "cpu":  # the interpreter can't round to bf16
            return self._multiplied(x.float()).to(x.dtype)
        with current(device):
            return self._multiplied(x)

    def _multiplied(self, x: Tensor) -> Tensor:
        if self.weight.order is not None:
            x = x.index_select(1, self.weight.order)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.weight.out_features, dtype=x.dtype, device=x.device)
        if not out.numel():
            return out
        if self.fmt.inputs is Inputs.FULL and x.shape[0] >= DENSE_ROWS:
            return self._dense(x, out)
        return self._tiled(x, out)

    def _tiled(self, x: Tensor, out: Tensor) -> Tensor:
        weight, rows, plan = self.weight, x.shape[0], self._plan(x)
        x_scale = x_sum = weight.scale  # pointers that are not read
        if self.fmt.inputs is not Inputs.FULL:
            x, x_scale = quantized(x, self.fmt.inputs, as_bytes=weight.kind is Kind.ROWS)
            if self.fmt.inputs is Inputs.INT8 and weight.zero is not None:
                x_sum = x.view(rows, weight.groups, weight.group).sum(-1, dtype=torch.int32)
        if weight.kind is Kind.Q4_K:
            x_sum = x.unflatten(1, (-1, 32)).sum(-1, dtype=torch.float32)  # one warp each, in any batch
        is_split = plan.splits > 1
        parts = (
            torch.empty(plan.splits, *out.shape, device=out.device, dtype=torch.float32) if is_split else out
        )
        grid = triton.cdiv(rows, plan.tile.rows), weight.padded_outputs // plan.tile.outputs, plan.splits
        plan.product(grid, (x, x_scale, x_sum, parts), (rows, x.stride(0), out.numel() if is_split else 0))
        if is_split:
            plan.sum((triton.cdiv(out.numel(), _SUMMED), 1, 1), (parts, out), (out.numel(),))
        return out

    def _plan(self, x: Tensor) -> _Plan:
        name = tiles.row_class(len(x)), x.dtype, shapes.changes()
        if name not in self._plans:
            self._plans[name] = self._planned(x)
        return self._plans[name]

    def _planned(self, x: Tensor) -> _Plan:
        weight, inputs, device = self.weight, self.fmt.inputs, x.device
        tile = tiles.fitted(weight, self.fmt.name, tiles.row_class(len(x)), shapes.target(x))
        splits, each = tiles.splits(weight, tile, len(x), device)
        fixed = {
            **dict(zip(("w_ptr", "scale_ptr", "zero_ptr"), self._tensors(), strict=True)),
            **{"outputs": weight.out_features, "blocks": weight.blocks, "split_blocks": each},
            **{"groups": weight.groups, "COMPUTE": compute_dtype(weight, inputs, x), "BM": tile.rows},
            **{"GROUPED": weight.is_grouped, "SCALED": inputs is not Inputs.FULL, **constants(weight, tile)},
        }
        tensors = "x_ptr", "x_scale_ptr", "x_sum_ptr", "out_ptr"
        product = Bound(linear_kernel, tensors, ("rows", "x_row", "out_split"), fixed)
        own = {"splits": splits, "WIDTH": _SUMMED, "num_warps": 4}
        added = Bound(add_parts_kernel, ("parts_ptr", "out_ptr"), ("count",), own)
        return _Plan(tile, splits, product, added)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, scales, and zero points or None; with ROWS, bytes have the inputs' rounded dtype."""
        weight = self.weight
        rounded = torch.int8 if self.fmt.inputs is Inputs.INT8 else torch.float8_e4m3fn
        codes = weight.codes.view(rounded) if weight.kind is Kind.ROWS else weight.codes
        return codes, weight.scale, weight.zero

    def _dense(self, x: Tensor, out: Tensor) -> Tensor:
        """Dequantize and multiply as many outputs at a time as fit in the workspace."""
        weight = self.weight
        tile = LinearTile(rows=16, outputs=64, warps=4, stages=1, programs=1)
        whole = tile.outputs * weight.in_features * x.element_size()
        count = min(max(1, DENSE_BYTES // whole), weight.padded_outputs // tile.outputs)  # tiles
        dense = torch.empty(count * tile.outputs, weight.in_features, dtype=x.dtype, device=x.device)
        for first in range(0, weight.padded_outputs // tile.outputs, count):
            begin = first * tile.outputs
            end = min(begin + count * tile.outputs, weight.out_features)
            numbers = {"first_tile": first, "outputs": weight.out_features, "out_row": dense.stride(0)}
            dtype = compute_dtype(weight, self.fmt.inputs, x)
            dequantize_kernel[(weight.blocks, triton.cdiv(end - begin, tile.outputs))](
                *self._tensors(), dense, **numbers, COMPUTE=dtype, **constants(weight, tile)
            )
            torch.mm(x, dense[: end - begin].T, out=out[:, begin:end])
        return out


def quantized(x: Tensor, inputs: Inputs, *, as_bytes: bool) -> tuple[Tensor, Tensor]:
    """Return codes [rows, in] and fp32 scales [rows]; FP8 codes are bytes if `as_bytes`, otherwise floats."""
    rows, count = x.shape
    dtype = torch.int8
    if inputs is Inputs.FP8:
        whole = torch.float32 if x.dtype is torch.float32 else torch.bfloat16
        dtype = torch.float8_e4m3fn if as_bytes else whole
    codes = torch.empty(rows, count, dtype=dtype, device=x.device)
    scale = torch.empty(rows, device=x.device, dtype=torch.float32)
    stored = codes.view(torch.uint8) if inputs is Inputs.FP8 and as_bytes else codes
    flags = {"FP8": inputs is Inputs.FP8, "BYTES": as_bytes}
    options = {"num_warps": 4, "enable_fp_fusion": False}  # the same bits as the reference
    width = min(_QUANTIZED, triton.next_power_of_2(count))
    quantize_kernel[(rows,)](x, stored, scale, x.stride(0), count, **flags, WIDTH=width, **options)
    return codes, scale


def compute_dtype(weight: PackedWeight, inputs: Inputs, x: Tensor) -> tl.dtype:
    """Return the dtype in which decoded codes are multiplied."""
    if weight.kind in (Kind.ROWS, Kind.SIGNED_NIBBLES):
        return tl.int8  # not read
    if x.device.type == "cpu" or x.dtype is torch.float32:
        return tl.float32  # the interpreter's 16-bit products can't be trusted
    return tl.bfloat16 if x.dtype is torch.bfloat16 or inputs is Inputs.FP8 else tl.float16


def constants(weight: PackedWeight, tile: LinearTile) -> dict[str, Any]:
    """Return the arguments shared by all kernels that read weights."""
    warps = max(1, min(tile.warps, tile.outputs // (8 * weight.runs)))
    return {
        **{"w_rows": weight.codes.shape[1], "padded": weight.padded_outputs, "group": weight.group},
        **{"blocks_per_group": weight.blocks_per_group, "KIND": weight.kind.value},
        **{"UNIT": _UNITS.get(weight.kind, 1.0), "BK": weight.block, "WIDTH": weight.width},
        **{"RUNS": weight.runs, "BN": tile.outputs, "WARPS": warps},
        "WHOLE": weight.group == weight.block * weight.blocks_per_group,
        **{"num_warps": tile.warps, "num_stages": tile.stages},
    }
