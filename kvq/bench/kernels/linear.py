"""`kvq bench linear`: a Linear layer with quantized weights, compared with unquantized weights."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.bench.kernels.measure import Contender, Rows, compete, copies_for, matrix_rate
from kvq.errors import ConfigError
from kvq.evals.watch import UNWATCHED, Progress
from kvq.formats.weights import Inputs, parse_weight_format
from kvq.kernels import Device, LinearSpec, PlainWeight, select
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.linear.reference import rounded_inputs
from kvq.kernels.native.library import load
from kvq.models.parts.linear import OneDNNLinear, is_supported
from kvq.weights.linear import linear_of
from kvq.weights.rounding import round_weight

_ALLOWED = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative errors


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearWorkload:
    """Shape of one Linear layer and the number of rows of its inputs."""

    out_features: int
    in_features: int
    rows: int
    dtype: torch.dtype  # of the inputs
    device: torch.device
    backend: str = "auto"  # of kvq's kernels
    seed: int = 0

    def weight(self) -> Tensor:
        """Return a random weight, fp32 [out, in]."""
        source = torch.Generator(self.device).manual_seed(self.seed)
        return torch.randn(
            self.out_features, self.in_features, generator=source, device=self.device, dtype=torch.float32
        )

    def inputs(self) -> Tensor:
        """Return random inputs, fp32 [rows, in]."""
        source = torch.Generator(self.device).manual_seed(self.seed + 1)
        return torch.randn(
            self.rows, self.in_features, generator=source, device=self.device, dtype=torch.float32
        )


def bench_linear(
    workload: LinearWorkload,
    formats: Sequence[str],
    *,
    rivals: bool = True,
    repeats: int = 20,
    progress: Progress = UNWATCHED.progress,
) -> tuple[Rows, float]:
    """Check every contender against fp64, then time them interleaved, rotating weights to prevent caching.

    The limit is the time to read the weights or, if longer, to multiply at torch's rate on a GPU, or at twice
    that rate for rounded inputs. Returns the rows and the memory read bandwidth in GB/s from the same run.

    Raises:
        KVQError: a contender's error is too large; nothing was timed.
    """
    with torch.inference_mode():
        found = [over_codes(workload, name) for name in formats]
        if rivals:
            found += _plain(workload)
        rows, bandwidth = compete(found, repeats, progress)
        rate = matrix_rate(workload.device, workload.dtype) if workload.device.type == "cuda" else math.inf
    rounding = {name for name in formats if parse_weight_format(name).inputs is not Inputs.FULL}
    operations = 2 * workload.rows * workload.in_features * workload.out_features
    for row in rows:
        read_s = row["gb_per_s"] * row["ms_median"] / 1e3 / bandwidth
        compute_s = operations / rate / (2 if row["weights"] in rounding else 1)
        row |= {
            "rows": workload.rows,
            "in_features": workload.in_features,
            "out_features": workload.out_features,
            "fraction_of_limit": 1e3 * max(read_s, compute_s) / row["ms_median"],
        }
    return rows, bandwidth


def parse_shape(text: str) -> tuple[int, int]:
    """Parse the numbers of outputs and inputs from a text such as `4096x11008`.

    Raises:
        ConfigError: the text does not consist of two positive numbers separated by an x.
    """
    outputs, _, inputs = text.lower().partition("x")
    if not (outputs.isdigit() and inputs.isdigit() and int(outputs) and int(inputs)):
        raise ConfigError(f"--shape takes OUTPUTSxINPUTS such as 4096x11008, got {text!r}")
    return int(outputs), int(inputs)


def over_codes(workload: LinearWorkload, name: str) -> Contender:
    """Return a contender that runs kvq's kernel with weights in the format `name`."""
    fmt = parse_weight_format(name)
    is_cpu = workload.device.type == "cpu"
    weight = round_weight(workload.weight(), fmt, dtype=torch.float32 if is_cpu else workload.dtype)
    spec = LinearSpec(fmt=fmt, in_features=workload.in_features, out_features=workload.out_features)
    kernel = select(spec.operation, spec, Device.of(workload.device), workload.backend)
    x = workload.inputs().to(workload.dtype)
    allowed = _ALLOWED[workload.dtype]
    if fmt.inputs is not Inputs.FULL and workload.dtype is torch.float32:
        allowed /= 20  # because the reference's inputs are also rounded
    copies = copies_for(workload.device, weight.nbytes)
    layers = [kernel.run(weight) for _ in range(copies)]
    return Contender(
        name="kvq",
        backend=kernel.backend,
        over={"weights": name},
        run=lambda copy: layers[copy](x),
        nbytes=layers[0].nbytes,
        copies=copies,
        truth=rounded_inputs(x.float(), fmt.inputs).double() @ weight.dequantize(torch.float64).T,
        allowed=allowed,
    )


def _plain(workload: LinearWorkload) -> Iterator[Contender]:
    """Yield products with unquantized weights in kvq and torch (on CPUs, oneDNN with packed weights)."""
    is_cpu = workload.device.type == "cpu"
    if is_cpu and workload.backend != "reference" and not isinstance(load(), str):
        for dtype in (torch.float32, torch.bfloat16):  # dtype of weights; the product is in fp32
            yield _unquantized(workload, "kvq", "cpu", dtype, workload.dtype)
    dtypes = filter(is_supported, (torch.float32, torch.bfloat16)) if is_cpu else [workload.dtype]
    for dtype in sorted(dtypes, key=str, reverse=True):
        yield _unquantized(workload, "torch", "onednn" if is_cpu else "cublas", dtype, dtype)


def _unquantized(
    workload: LinearWorkload, name: str, backend: str, dtype: torch.dtype, inputs: torch.dtype
) -> Contender:
    """Return a contender that multiplies inputs and weights of these dtypes."""
    weight = workload.weight().to(dtype)
    x = workload.inputs().to(inputs)
    copies = copies_for(workload.device, weight.nbytes)
    layers = [_LAYERS[backend](weight) for _ in range(copies)]
    return Contender(
        name=name,
        backend=backend,
        over={"weights": str(dtype).removeprefix("torch.")},
        run=lambda copy: layers[copy](x),
        nbytes=weight.nbytes,
        copies=copies,
        truth=x.double() @ weight.double().T,
        allowed=_ALLOWED[inputs],
    )


_LAYERS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "cpu": lambda weight: CpuLinear(PlainWeight(values=weight)),
    "onednn": lambda weight: OneDNNLinear(linear_of(weight), packs=True),
    "cublas": lambda weight: linear_of(weight.clone()),
}
