"""`kvq bench linear`: a Linear layer over quantized weights beside torch's over plain ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvq.bench.measure import Run, Stopwatch, cache_bytes, interleaved, read_bandwidth
from kvq.bench.truth import relative_error
from kvq.errors import ConfigError, KVQError
from kvq.formats.weights import Inputs, parse_weight_format
from kvq.kernels import Device, LinearSpec, PlainWeight, select
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.linear.inputs import rounded_inputs
from kvq.kernels.native.library import load
from kvq.models.linear import OneDNNLinear
from kvq.weights.rounding import round_weight

_MOST_COPIES = 64
_ALLOWED = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative errors


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearWorkload:
    """One layer and the number of rows that it is given at a time."""

    out_features: int
    in_features: int
    rows: int
    dtype: torch.dtype  # of the inputs
    device: torch.device
    seed: int = 0

    def weight(self) -> Tensor:
        """Random, fp32 [out, in]."""
        source = torch.Generator().manual_seed(self.seed)
        weight = torch.randn(self.out_features, self.in_features, generator=source)
        return weight.to(self.device)

    def inputs(self) -> Tensor:
        """Random, fp32 [rows, in]."""
        source = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.rows, self.in_features, generator=source).to(self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contender:
    name: str
    backend: str
    weights: str
    run: Run  # of one copy of the weight
    nbytes: int  # of one copy
    copies: int
    truth: Tensor  # fp64
    allowed: float  # relative error


def bench_linear(
    workload: LinearWorkload,
    formats: Sequence[str],
    *,
    backend: str = "auto",
    rivals: bool = True,
    repeats: int = 20,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, Any]], float]:
    """Check every contender against fp64, then time them interleaved, weights rotated past the cache.

    Returns the rows and the memory read bandwidth of the same run in GB/s.

    Raises:
        KVQError: a contender's error is too large; nothing was timed.
    """
    with torch.inference_mode():
        found = [_quantized(workload, name, backend) for name in formats]
        if rivals:
            found += list(_plain(workload, backend))
        errors = [_check(contender) for contender in found]
        watches = [Stopwatch(x.run, x.copies, workload.device) for x in found]
        times = interleaved(watches, repeats, progress)
        bandwidth = read_bandwidth(workload.device)
    rows = []
    for contender, error, time in zip(found, errors, times, strict=True):
        rate = contender.nbytes / time["ms_median"] / 1e6
        rows.append(
            {
                "name": contender.name,
                "backend": contender.backend,
                "weights": contender.weights,
                "rows": workload.rows,
                "in_features": workload.in_features,
                "out_features": workload.out_features,
                **time,
                "gb_per_s": rate,
                "fraction_of_limit": rate / bandwidth,  # the limit of few rows
                "max_relative_error": error,
            }
        )
    return rows, bandwidth


def parse_shape(text: str) -> tuple[int, int]:
    """Outputs and inputs of `4096x11008`.

    Raises:
        ConfigError: not two positive numbers with an x between.
    """
    outputs, _, inputs = text.lower().partition("x")
    if not (outputs.isdigit() and inputs.isdigit() and int(outputs) and int(inputs)):
        raise ConfigError(f"--shape takes OUTPUTSxINPUTS such as 4096x11008, got {text!r}")
    return int(outputs), int(inputs)


def _check(contender: _Contender) -> float:
    error = relative_error(contender.run(0), contender.truth)
    if not error <= contender.allowed:
        raise KVQError(
            f"{contender.name} over {contender.weights} is wrong: relative error {error:.1e}, "
            f"allowed {contender.allowed:.1e}; nothing was timed"
        )
    return error


def _copies(nbytes: int, device: torch.device) -> int:
    """How many weights of that size are four times the last-level cache."""
    return max(1, min(_MOST_COPIES, -(-4 * cache_bytes(device) // nbytes)))


def _quantized(workload: LinearWorkload, name: str, backend: str) -> _Contender:
    """kvq's kernel over fp32 scales, so that the dequantized weight is exact."""
    fmt = parse_weight_format(name)
    weight = round_weight(workload.weight(), fmt)
    spec = LinearSpec(fmt=fmt, in_features=workload.in_features, out_features=workload.out_features)
    kernel = select(spec.operation, spec, Device.of(workload.device), backend)
    copies = _copies(weight.nbytes, workload.device)
    layers = [kernel.run(weight) for _ in range(copies)]
    x = workload.inputs().to(workload.dtype)
    truth = rounded_inputs(x.float(), fmt.inputs).double() @ weight.dequantize().double().T
    allowed = _ALLOWED[workload.dtype]
    if fmt.inputs is not Inputs.FULL and workload.dtype is torch.float32:
        allowed /= 20  # what is rounded already is not rounded again
    return _Contender(
        name="kvq",
        backend=kernel.backend,
        weights=name,
        run=lambda copy: layers[copy](x),
        nbytes=layers[0].nbytes,
        copies=copies,
        truth=truth,
        allowed=allowed,
    )


def _plain(workload: LinearWorkload, backend: str) -> Iterator[_Contender]:
    """Products over weights that are no codes: torch's (on CPUs oneDNN's over packed weights), and kvq's."""
    is_cpu = workload.device.type == "cpu"
    if is_cpu and backend != "reference" and not isinstance(load(), str):
        yield from (_own(workload, dtype) for dtype in (torch.float32, torch.bfloat16))
    dtypes = {torch.float32, torch.bfloat16} if is_cpu else {workload.dtype}
    for dtype in sorted(dtypes, key=str, reverse=True):
        weight = workload.weight().to(dtype)
        nbytes = weight.nbytes
        copies = _copies(nbytes, workload.device)
        layers = [_layer(weight, packs=is_cpu) for _ in range(copies)]
        x = workload.inputs().to(dtype)
        yield _Contender(
            name="torch",
            backend="onednn" if is_cpu else "cublas",
            weights=str(dtype).removeprefix("torch."),
            run=lambda copy, layers=layers, x=x: layers[copy](x),  # type: ignore[misc]
            nbytes=nbytes,
            copies=copies,
            truth=x.double() @ weight.double().T,
            allowed=_ALLOWED[dtype],
        )


def _own(workload: LinearWorkload, dtype: torch.dtype) -> _Contender:
    """kvq's fp32 product over weights of that dtype."""
    weight = workload.weight().to(dtype)
    copies = _copies(weight.nbytes, workload.device)
    layers = [CpuLinear(PlainWeight(values=weight)) for _ in range(copies)]
    x = workload.inputs().to(workload.dtype)
    return _Contender(
        name="kvq",
        backend="cpu",
        weights=str(dtype).removeprefix("torch."),
        run=lambda copy: layers[copy](x),
        nbytes=layers[0].nbytes,
        copies=copies,
        truth=x.double() @ weight.double().T,
        allowed=_ALLOWED[workload.dtype],
    )


def _layer(weight: Tensor, *, packs: bool) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight if packs else weight.clone(), requires_grad=False)
    return OneDNNLinear(linear, packs=True) if packs else linear
