"""`linear_w4` and `linear_w8` in C++ for CPUs, products with unquantized weights, and gated MLPs."""

import ctypes
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats.ggml import GgmlType
from kvq.formats.weights import WeightCode, WeightFormat
from kvq.kernels.gated.reference import Activation, check_activation
from kvq.kernels.linear.pack import pack_blocks, pack_panels, pack_plain, unpack_plain
from kvq.kernels.native.abi import DTYPES, NUMBERS, checked_rows, rows_of, struct
from kvq.kernels.native.library import run
from kvq.kernels.weight import BlockWeight, PlainWeight, QuantizedWeight, Weight


def _code_of(fmt: WeightFormat | GgmlType) -> int:
    """Return the KvqCode number of a format's codes; 3-bit codes are stored in 4 bits."""
    if isinstance(fmt, GgmlType):
        return NUMBERS["KVQ_BLOCKS"]
    return NUMBERS["KVQ_INT4" if fmt.code is WeightCode.INT3 else f"KVQ_{fmt.code.name}"]


def best_products() -> int:
    """Return the KvqProducts value with which this CPU multiplies bf16 rows by bf16 weights fastest."""
    found = ctypes.c_int(0)
    run("linear_products", ctypes.addressof(found))
    return found.value


def _runs(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Divide weights into runs of one format; integer codes are one run, whose packing checks their formats.

    Raises:
        ConfigError: integer codes are among others, or inputs differ.
    """
    codes = [weight.fmt.name for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(codes) == len(weights):
        return [list(weights)]
    if codes:
        raise ConfigError(f"weights in {codes[0]} and in floats or blocks can't be joined")
    if len(inputs := {weight.in_features for weight in weights}) > 1:
        raise ConfigError(f"only weights of the same inputs can be joined, got {sorted(inputs)} of them")
    return [list(own) for _, own in groupby(weights, key=lambda weight: getattr(weight, "fmt", None))]


def _packed(weights: Sequence[Any]) -> Any:
    """Pack adjacent weights of one format."""
    if isinstance(weights[0], PlainWeight):
        return pack_plain(weights)
    return pack_blocks(weights) if isinstance(weights[0], BlockWeight) else pack_panels(weights)


def _struct_of(panels: Any, weights: Sequence[Weight]) -> Any:
    """Return the KvqLinear of adjacent weights of one format."""
    first, scales, zeros, order = weights[0], panels.scales, panels.zeros, panels.order
    numbers = {"groups": 1 if scales is None else scales.shape[1], "inputs": NUMBERS["KVQ_INPUTS_FULL"]}
    if isinstance(first, BlockWeight):
        kind = first.fmt
        numbers |= {"groups": first.in_features // kind.group, "blocks": NUMBERS[f"KVQ_{kind.name}"]}
    if not isinstance(first, PlainWeight):
        numbers["inputs"] = NUMBERS[f"KVQ_INPUTS_{first.fmt.inputs.name}"]
    return struct("KvqLinear")(
        codes=panels.codes.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        zeros=None if zeros is None else zeros.data_ptr(),
        order=None if order is None else order.data_ptr(),
        in_features=first.in_features,
        out_features=sum(weight.out_features for weight in weights),
        k=panels.columns,
        code=DTYPES[panels.codes.dtype] if isinstance(first, PlainWeight) else _code_of(first.fmt),
        scale_code=0 if scales is None else DTYPES[scales.dtype],
        products=best_products(),
        **numbers,
    )


class CpuLinear:
    """y = x W^T with a weight stored in panels.

    Integer codes are multiplied as integers. Inputs that the format doesn't round are converted to 16-bit
    integers, 128 at a time: results agree with fp32 products to about 1e-5 of the largest result. Scales are
    not rounded into the weight, so with 16-bit scales, results are more exact than the reference's. Products
    with float weights are as exact as in fp32; on CPUs with AMX, they are sums of bf16 products, and inputs,
    weights or products below 1e-31 in magnitude lose digits (split.h). A row's result is bit-identical
    regardless of the other rows and the number of threads. If a row contains a NaN or an infinity, its result
    is NaN; with float weights, it may also be the value that floating-point products yield.
    """

    def __init__(self, *weights: Weight) -> None:
        """Pack one weight, or several for the same inputs, with their outputs concatenated.

        Raises:
            ConfigError: formats, inputs or their order differ; formats of blocks and floats may.
        """
        self.in_features = weights[0].in_features
        self.out_features = sum(weight.out_features for weight in weights)
        runs = _runs(weights)
        self._panels = [_packed(run) for run in runs]
        structs = [_struct_of(*each) for each in zip(self._panels, runs, strict=True)]
        for after, before in pairwise(reversed(structs)):
            before.next = ctypes.addressof(after)
            before.out_features += after.out_features
        self.struct, self._others = structs[0], structs[1:]
        self.nbytes = sum(panels.nbytes for panels in self._panels)
        self.code_bytes = sum(panels.codes.nbytes for panels in self._panels)

    def values(self) -> Tensor:
        """Return a copy of a weight in floats, or of the values of blocks in fp32: [out, in].

        Raises:
            ConfigError: the weight is in integer codes.
        """
        if len(self._panels) == 1 and self.struct.code in DTYPES.values():
            return unpack_plain(self._panels[0], self.out_features, self.in_features)
        return self.look_up(torch.arange(self.out_features), torch.float32)

    def look_up(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up rows of a weight in floats or blocks: int64 [...] -> [..., in] in `dtype`.

        Raises:
            ConfigError: the weight is in integer codes, `rows` is not int64, or `dtype` is not supported.
            IndexError: a row number is too large.
        """
        if any(panels.scales is not None for panels in self._panels):
            raise ConfigError("a weight in codes is no floats; dequantize what it was packed from")
        if rows.dtype is not torch.int64 or dtype not in DTYPES:
            raise ConfigError(
                f"rows are looked up by int64 numbers as fp32, bf16 or fp16, got {rows.dtype} and {dtype}"
            )
        rows = rows.contiguous()
        out = torch.empty(*rows.shape, self.in_features, dtype=dtype)
        where = rows.data_ptr(), rows.numel(), out.data_ptr()
        run("linear_rows", self.struct, *where, DTYPES[dtype], torch.get_num_threads())
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: [rows, in] -> [rows, out] in x's dtype."""
        x = checked_rows(x, self.in_features)
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        sizes = DTYPES[x.dtype], len(x), torch.get_num_threads()
        run("linear", self.struct, *rows_of(x), *rows_of(out), *sizes)
        return out


class CpuLinears:
    """y[:, i] = x[:, i] W[i]^T, each with its own weight in panels; bit-identical to `CpuLinear`."""

    def __init__(self, values: Tensor) -> None:
        """Pack weights. `values`: [count, out, in]; fp32 values are stored in 16 bits where that is exact."""
        self._dtype = values.dtype
        narrow = PlainWeight.narrowest(values.flatten(0, 1)).values.unflatten(0, values.shape[:2])
        self._each = [CpuLinear(PlainWeight(values=weight)) for weight in narrow]
        self._structs = (struct("KvqLinear") * len(self._each))(*(linear.struct for linear in self._each))
        self.out_features, self.in_features = values.shape[1:]
        self.nbytes = sum(linear.nbytes for linear in self._each)

    def values(self) -> Tensor:
        """Return a copy of the weights, [count, out, in]."""
        return torch.stack([linear.values().to(self._dtype) for linear in self._each])

    def __call__(self, x: Tensor, *, room: int = 0) -> Tensor:
        """Multiply: [rows, count, in] -> [rows, count, out + room] in x's dtype; the last `room` are left
        blank.

        Raises:
            ConfigError: the shape or dtype is not supported.
        """
        if x.dim() != 3 or x.shape[1:] != (len(self._each), self.in_features) or x.dtype not in DTYPES:
            shape = f"[rows, {len(self._each)}, {self.in_features}]"
            raise ConfigError(f"inputs must be fp32, bf16 or fp16 {shape}, got {x.dtype} {list(x.shape)}")
        x = x if x.stride(2) == 1 else x.contiguous()
        out = torch.empty(*x.shape[:2], self.out_features + room, dtype=x.dtype)
        sizes = DTYPES[x.dtype], len(x), torch.get_num_threads()
        run("linear_each", self._structs, len(self._each), *_each_of(x), *_each_of(out), *sizes)
        return out


def _each_of(x: Tensor) -> tuple[int, int, int]:
    return *rows_of(x), x.stride(1) * x.element_size()


class CpuMLP:
    """y = down(activation(gate(x)) * up(x)) in one call, bit-identical to three separate calls."""

    def __init__(self, gate_up: CpuLinear, down: CpuLinear, activation: Activation) -> None:
        """Combine the weights of an MLP. `gate_up`: gate and up fused, in this order.

        Raises:
            ConfigError: `down` doesn't match `gate_up`, or the activation has no C++ kernel.
        """
        check_activation(activation)
        if gate_up.out_features != 2 * down.in_features:
            raise ConfigError(
                f"gate and up give {gate_up.out_features} outputs together, "
                f"but down takes {down.in_features} inputs; it must be half as many"
            )
        self._gate_up, self._down, self.activation = gate_up, down, activation
        self.nbytes = gate_up.nbytes + down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Run the MLP: [rows, in] -> [rows, out] in x's dtype."""
        x = checked_rows(x, self._gate_up.in_features)
        out = torch.empty(x.shape[0], self._down.out_features, dtype=x.dtype)
        sizes = DTYPES[x.dtype], self.activation, len(x), torch.get_num_threads()
        run("linear_mlp", self._gate_up.struct, self._down.struct, *rows_of(x), *rows_of(out), *sizes)
        return out
