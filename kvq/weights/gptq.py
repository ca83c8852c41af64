"""GPTQ: columns are rounded one by one, and later columns compensate for the error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022, section 3 and algorithm 1; acting order and groups as in the authors' published code.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, get_args

import torch
from torch import Tensor

from kvq.errors import ConfigError, RequestError
from kvq.formats.weights import WeightFormat
from kvq.kernels.weight import QuantizedWeight
from kvq.weights.rounding import Cost, search_scales, squares, weighted

_BLOCK = 128  # columns whose updates of all later columns are applied at once
_MOST_TRIES = 5
_log = logging.getLogger(__name__)

# D176: "none": columns in input order. "static": most active inputs first, but groups of adjacent inputs,
# with scales from the initial weights. "group": groups of inputs that are adjacent in the order of activity
ActOrder = Literal["none", "static", "group"]
# D175: the range of every group. "off": minimum to maximum. "squares": least squared error of the weights.
# "weighted": the same, with each input weighted by its mean square
ScaleSearch = Literal["off", "squares", "weighted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQOptions:
    """Options of GPTQ."""

    damping: float = 0.01  # fraction of the Hessian's mean diagonal that is added to the diagonal
    order: ActOrder = "none"
    search: ScaleSearch = "off"

    def __post_init__(self) -> None:
        if not 0 < self.damping < 1:
            raise ConfigError(f"damping must lie between 0 and 1, got {self.damping}; 0.01 is usual")
        for name, value, allowed in (
            ("act-order", self.order, get_args(ActOrder)),
            ("scale search", self.search, get_args(ScaleSearch)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def gptq(
    weight: Tensor,
    gram: Tensor,
    fmt: WeightFormat,
    *,
    options: GPTQOptions,
    dtype: torch.dtype,
    name: str = "the layer",
) -> QuantizedWeight:
    """Quantize a weight [out, in] with the least change in outputs; `gram`: sum of x x^T, fp32 [in, in].

    Computes in fp32; scales have dtype `dtype`. Weights of inputs that were always zero are rounded to
    nearest.

    Raises:
        RequestError: the Hessian can't be factorized; the message names the layer.
        ConfigError: the format is FP8, or its groups don't divide the inputs.
    """
    if not fmt.code.is_integer:
        raise ConfigError("GPTQ is for integer codes; fp8 weights are rounded to nearest")
    count = weight.shape[1]
    size = count // fmt.groups(count)
    order = None
    if options.order != "none":
        order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    weight = weight.float().contiguous()
    columns = weight.T.contiguous()  # [in, out]: one column is rounded at a time
    if order is not None:
        columns, gram = columns[order], gram[order][:, order]
    factor, price = _factor(gram, options.damping, name), gram.diagonal()
    found: list[tuple[Tensor, Tensor | None]] = []  # scales and zero points

    def search_as_reached() -> Iterator[tuple[Tensor, Tensor]]:
        whole = WeightFormat(code=fmt.code, symmetric=fmt.symmetric)
        for at in range(0, count, size):
            group = columns[at : at + size].T.contiguous()  # with all updates so far
            found.append(search_scales(group, whole, dtype, _cost(price[at : at + size], options)))
            yield from repeat(_of_group(*found[-1], 0), size)

    scales = search_as_reached()
    if order is not None and options.order == "static":
        cost = _cost(torch.empty_like(price).index_copy_(0, order, price), options)
        found.append(search_scales(weight, fmt, dtype, cost))
        scales = (_of_group(*found[0], group) for group in (order // size).tolist())
    codes = _round(columns, factor, fmt, _block(size, fmt), scales)
    in_order = order if options.order == "group" and size < count else None  # groups follow it
    if order is not None and in_order is None:
        codes = torch.empty_like(codes).index_copy_(0, order, codes)
    zeros = [zero for _, zero in found if zero is not None]
    return QuantizedWeight.pack(
        fmt,
        codes.T.contiguous(),
        torch.cat([scale for scale, _ in found], 1),
        torch.cat(zeros, 1) if zeros else None,
        in_order,
    )


def _of_group(scale: Tensor, zero: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """Return a group's scales and zero points, fp32 [out] each."""
    own = scale[:, group].float()
    return own, torch.zeros_like(own) if zero is None else zero[:, group].float()


def _round(
    columns: Tensor, factor: Tensor, fmt: WeightFormat, block: int, scales: Iterator[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return codes int8 [in, out] of columns fp32 [in, out]; rounding a column updates later columns.

    `factor`: fp32 [in, in], upper triangular; factor^T factor is the inverse Hessian. `scales`: iterator over
    columns' scales and zero points, advanced when a column is reached.
    """
    count, half = len(columns), 1 << (fmt.code.bits - 1)
    codes = torch.empty(columns.shape, dtype=torch.int8, device=columns.device)
    errors = torch.empty(min(count, block), columns.shape[1], device=columns.device, dtype=torch.float32)
    pivots: list[float] = factor.diagonal().tolist()
    for begin in range(0, count, block):
        end = min(begin + block, count)
        for at in range(begin, end):
            scale, zero = next(scales)
            column, error = columns[at], errors[at - begin]
            q = torch.div(column, scale).round_().add_(zero).clamp_(-half, half - 1)
            codes[at] = q
            torch.sub(column, q.sub_(zero).mul_(scale), out=error)
            error /= pivots[at]
            if at + 1 < end:
                columns[at + 1 : end].addcmul_(factor[at, at + 1 : end, None], error[None], value=-1)
        if end < count:
            columns[end:].addmm_(factor[begin:end, end:].T, errors[: end - begin], alpha=-1)
    return codes


def _block(size: int, fmt: WeightFormat) -> int:
    """Return the number of columns per block; all updates are applied before a new group starts."""
    if fmt.group_size is None:
        return _BLOCK
    if size <= _BLOCK:
        return _BLOCK // size * size
    return max(part for part in range(1, _BLOCK + 1) if size % part == 0)


def _cost(price: Tensor, options: GPTQOptions) -> Cost | None:
    if options.search == "off":
        return None
    return squares if options.search == "squares" else weighted(price)


def _factor(gram: Tensor, damping: float, name: str) -> Tensor:
    """Return the upper triangular U for which U^T U is the inverse of the damped Hessian; fp32 [in, in].

    The Cholesky factor of the Hessian in reverse order is U's inverse in reverse order. This takes one
    factorization and one triangular inverse, compared with three operations in the paper.
    """
    mean = float(gram.diagonal().mean())
    if mean == 0:  # all the layer's inputs were zero
        return torch.eye(len(gram), device=gram.device, dtype=torch.float32)
    backwards = (gram / mean).flip(0, 1)  # scale-free: codes don't depend on the Hessian's size
    diagonal = backwards.diagonal()
    added = 0.0
    for _ in range(_MOST_TRIES):
        diagonal += damping - added
        added = damping
        lower, failed = torch.linalg.cholesky_ex(backwards)
        if not failed:
            unit = torch.eye(len(gram), device=gram.device, dtype=torch.float32)
            upper: Tensor = torch.linalg.solve_triangular(lower, unit, upper=False).flip(0, 1)
            if torch.isfinite(upper).all():
                return upper.contiguous()
        _log.warning("%s: the Hessian can't be factorized with damping %g; ten times as much", name, damping)
        damping *= 10
    raise RequestError(
        f"{name}: the Hessian of its inputs can't be factorized, even with damping {added:g}; "
        f"calibrate on more or other text"
    )
