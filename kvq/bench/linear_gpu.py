"""Quantized Linear layers on a GPU beside torch's bf16: checked first, then timed in turns."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvq.bench.measure import Stopwatch, cache_bytes, interleaved, read_bandwidth
from kvq.bench.truth import relative_error
from kvq.errors import KVQError
from kvq.formats.weights import Inputs, parse_weight_format
from kvq.kernels import Device, LinearSpec, QuantizedWeight, select
from kvq.kernels.gpu import shapes
from kvq.kernels.linear import tiles
from kvq.kernels.linear.inputs import rounded_inputs
from kvq.kernels.linear.tiles import LinearTile
from kvq.weights.rounding import round_weight

SHAPES = ((4096, 14_336), (14_336, 4096), (4096, 4096))  # inputs, outputs
ROWS = (1, 4, 16, 64, 256, 2048)
FORMATS = ("int4_g128", "int4_g128_asym", "int8", "w8a8", "fp8", "fp8_a8")
_ALLOWED = 2e-2  # relative error; bf16 rounds outputs
_CHECKED_ROWS = 32  # from the beginning and from the end
_PEAK_SIZE = 8192


def bench_linear(
    shape: tuple[int, int], rows: Sequence[int], formats: Sequence[str], *, repeats: int
) -> list[dict[str, Any]]:
    """Times of one layer shape in bf16 and in each format, for steps of so many rows.

    Raises:
        KVQError: a kernel is wrong; nothing is timed then.
    """
    device = torch.device("cuda")
    bandwidth, peak = read_bandwidth(device), _matrix_rate(device)
    inputs, outputs = shape
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
    quantized = {name: round_weight(weight, parse_weight_format(name)) for name in formats}
    runs: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "bf16": [_dense(weight.clone()) for _ in range(_copies(weight.nbytes, device))]
    }
    nbytes = {"bf16": weight.nbytes}
    for name, codes in quantized.items():
        spec = LinearSpec(fmt=codes.fmt, in_features=inputs, out_features=outputs)
        kernel = select(spec.operation, spec, Device.of(device), "triton")
        nbytes[name] = codes.nbytes
        runs[name] = [kernel.run(codes) for _ in range(_copies(codes.nbytes, device))]
    found = []
    for count in rows:
        x = torch.randn(count, inputs, device=device, dtype=torch.bfloat16)
        errors = {name: _error(name, runs[name][0], x, weight, quantized) for name in runs}
        watches = [_watch(layers, x, device) for layers in runs.values()]
        times = interleaved(watches, repeats, lambda: None)
        bf16_ms = times[0]["ms_median"]
        for name, time in zip(runs, times, strict=True):
            moved = nbytes[name] + x.nbytes + 2 * count * outputs
            rate = peak * (2 if name != "bf16" and quantized[name].fmt.inputs is not Inputs.FULL else 1)
            limit_ms = 1e3 * max(moved / bandwidth / 1e9, 2 * count * inputs * outputs / rate)
            found.append(
                {
                    "name": "torch" if name == "bf16" else "triton",
                    "weights": name,
                    "rows": count,
                    "in_features": inputs,
                    "out_features": outputs,
                    **time,
                    "gb_per_s": moved / time["ms_median"] / 1e6,
                    "fraction_of_limit": limit_ms / time["ms_median"],
                    "speedup_over_bf16": bf16_ms / time["ms_median"],
                    "max_relative_error": errors[name],
                }
            )
    return found


def candidates(rows: int) -> list[LinearTile]:
    """Tiles worth trying for a class of rows."""
    many = rows == tiles.MANY_ROWS
    return [
        LinearTile(rows=height, outputs=outputs, warps=warps, stages=stages, programs=programs)
        for height in ((64, 128) if many else (rows,))
        for outputs in ((128, 256) if many else (64, 128, 256))
        for warps in ((4, 8) if many else (2, 4, 8))
        for stages in ((3, 4) if rows > 32 else (3, 4, 6))
        for programs in ((1,) if many else (1, 2, 4, 8))
    ]


def tune_linear(
    name: str, rows: int, shape: tuple[int, int] = SHAPES[0], *, repeats: int = 5
) -> tuple[str, LinearTile, list[dict[str, Any]]]:
    """Time every tile that compiles and is right; returns its key, the best tile and all rows.

    `rows`: a class of `tiles.ROW_CLASSES` or `tiles.MANY_ROWS`.

    Raises:
        KVQError: there is none.
    """
    device = torch.device("cuda")
    inputs, outputs = shape
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
    codes = round_weight(weight, parse_weight_format(name))
    spec = LinearSpec(fmt=codes.fmt, in_features=inputs, out_features=outputs)
    kernel = select(spec.operation, spec, Device.of(device), "triton")
    layers = [kernel.run(codes) for _ in range(_copies(codes.nbytes, device))]
    x = torch.randn(rows if rows != tiles.MANY_ROWS else 256, inputs, device=device, dtype=torch.bfloat16)
    key = shapes.table_key("linear", name, rows, shapes.device_name(device))
    tried, watches = [], []
    for tile in candidates(rows):
        with shapes.using(key, tile):
            try:
                _error(name, layers[0], x, weight, {name: codes})
            except (RuntimeError, KVQError):  # more registers or shared memory than there are, or wrong
                continue
            tried.append(tile)
            watches.append(_watch(layers, x, device))
    if not tried:
        raise KVQError(f"no tile of {key} compiles and is right on this device; nothing was tuned")
    times = interleaved(watches, repeats, lambda: None)
    found = [{"key": key, **asdict(tile), **time} for tile, time in zip(tried, times, strict=True)]
    best = min(range(len(tried)), key=lambda i: times[i]["ms_median"])
    return key, tried[best], found


def _dense(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.matmul(x, weight.T)


def _copies(nbytes: int, device: torch.device) -> int:
    """Copies of a weight that together are several times the cache, so that each is read from memory."""
    return max(2, -(-3 * cache_bytes(device) // nbytes))


def _watch(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor, device: torch.device) -> Stopwatch:
    return Stopwatch(lambda copy: layers[copy](x), len(layers), device)


def _error(
    name: str,
    layer: Callable[[Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    quantized: dict[str, QuantizedWeight],
) -> float:
    """Relative error to fp64 of the first and the last rows."""
    part = torch.cat([x[:_CHECKED_ROWS], x[-_CHECKED_ROWS:]])
    got = layer(x)
    got = torch.cat([got[:_CHECKED_ROWS], got[-_CHECKED_ROWS:]])
    if name == "bf16":
        want = part.double() @ weight.double().T
    else:
        codes = quantized[name]
        exact = QuantizedWeight(
            fmt=codes.fmt, codes=codes.codes, scale=codes.scale.double(), zero=codes.zero, order=codes.order
        ).dequantize()
        want = rounded_inputs(part.float(), codes.fmt.inputs).double() @ exact.T
    error = relative_error(got, want)
    if not error < _ALLOWED:
        raise KVQError(f"{name} with {x.shape[0]} rows errs by {error:.1e} of the largest output")
    return error


def _matrix_rate(device: torch.device) -> float:
    """Operations a second of torch's bf16 product of two large matrices."""
    a, b = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    watch = Stopwatch(lambda _: a @ b, 1, device)
    return 2e3 * _PEAK_SIZE**3 / sorted(watch.sample() for _ in range(5))[2]
