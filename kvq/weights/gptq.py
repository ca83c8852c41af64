"""GPTQ: columns are rounded one by one, and later columns compensate the error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
2022, section 3 and algorithm 1; acting order and groups as in the authors' published code.
"""

import logging
from dataclasses import dataclass
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


# D176: groups as inputs lie; "none": columns as they lie. "static": most active inputs first; groups are
# neighbouring inputs, with scales of the first weights. "group": groups are neighbours in that order
ActOrder = Literal["none", "static", "group"]
# D175: every group's range, inputs by mean square; "off": minimum to maximum. "squares": least squared error
# of the weights. "weighted": the same, each input weighted by its mean square
ScaleSearch = Literal["off", "squares", "weighted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQOptions:
    """Options of GPTQ."""

    damping: float = 0.01  # share of the Hessian's mean diagonal that is added to it
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
    """Quantize a weight [out, in] so that its outputs change least, given the sum of x x^T, fp32 [in, in].

    Works in fp32. Scales have `dtype`. A dead input, always zero while calibrating, is rounded to nearest.

    Raises:
        RequestError: the Hessian can't be factorized; the message names the layer.
        ConfigError: FP8, or groups that don't divide the inputs.
    """
    if not fmt.code.is_integer:
        raise ConfigError("GPTQ is for integer codes; fp8 weights are rounded to nearest")
    count = weight.shape[1]
    size = count // fmt.groups(count)
    order = None
    if options.order != "none":
        order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    weight = weight.float().contiguous()
    columns = weight.T.contiguous()  # [in, out]: a column is rounded at a time
    if order is not None:
        columns, gram = columns[order], gram[order][:, order]
    work = _Columns(columns, _factor(gram, options.damping, name), fmt)
    price = gram.diagonal()
    static = None
    if order is not None and options.order == "static":
        static = search_scales(
            weight, fmt, dtype, _cost(torch.empty_like(price).index_copy_(0, order, price), options)
        )
    block = _block(size, fmt)
    for begin in range(0, count, block):
        end = min(begin + block, count)
        for at in range(begin, end):
            if static is not None:
                assert order is not None, "static scales go with an order"
                work.use(*static, int(order[at]) // size)
            elif at % size == 0:
                work.start_group(at, size, dtype, _cost(price[at : at + size], options))
            work.round(at, begin, end)
        work.update_later(begin, end)
    return work.result(static, order, fmt, in_order=options.order == "group" and size < count)


class _Columns:
    """Columns of a weight while they are rounded to codes."""

    def __init__(self, columns: Tensor, factor: Tensor, fmt: WeightFormat) -> None:
        self.columns = columns  # fp32 [in, out]; from the first not yet rounded on, as updated so far
        self.factor = factor  # fp32 [in, in], upper; factor^T factor is the inverse Hessian
        self.fmt = fmt
        self.codes = torch.empty(columns.shape, dtype=torch.int8, device=columns.device)
        self.error = torch.empty(min(len(columns), 2 * _BLOCK), columns.shape[1], device=columns.device)
        self.pivots: list[float] = factor.diagonal().tolist()
        self.scales: list[Tensor] = []
        self.zeros: list[Tensor] = []
        self.scale = self.zero = columns  # of the group at hand, fp32 [out]

    def start_group(self, at: int, size: int, dtype: torch.dtype, cost: Cost | None) -> None:
        """Choose scales for the columns from `at` on, with all updates so far."""
        group = self.columns[at : at + size].T.contiguous()
        whole = WeightFormat(code=self.fmt.code, symmetric=self.fmt.symmetric)
        scale, zero = search_scales(group, whole, dtype, cost)
        self.scales.append(scale)
        if zero is not None:
            self.zeros.append(zero)
        self.use(scale, zero, 0)

    def use(self, scale: Tensor, zero: Tensor | None, group: int) -> None:
        """Use scales chosen before."""
        self.scale = scale[:, group].float()
        self.zero = torch.zeros_like(self.scale) if zero is None else zero[:, group].float()

    def round(self, at: int, begin: int, end: int) -> None:
        """Round column `at`, and compensate in the later ones of the block [begin, end)."""
        column = self.columns[at]
        half = 1 << (self.fmt.code.bits - 1)
        q = torch.div(column, self.scale).round_().add_(self.zero).clamp_(-half, half - 1)
        self.codes[at] = q
        error = self.error[at - begin]
        torch.sub(column, q.sub_(self.zero).mul_(self.scale), out=error)
        error /= self.pivots[at]
        if at + 1 < end:
            later = self.columns[at + 1 : end]
            later.addcmul_(self.factor[at, at + 1 : end, None], error[None], value=-1)

    def update_later(self, begin: int, end: int) -> None:
        """Compensate the errors of a block in all columns after it."""
        if end < len(self.columns):
            self.columns[end:].addmm_(self.factor[begin:end, end:].T, self.error[: end - begin], alpha=-1)

    def result(
        self,
        static: "tuple[Tensor, Tensor | None] | None",
        order: Tensor | None,
        fmt: WeightFormat,
        *,
        in_order: bool,
    ) -> QuantizedWeight:
        """Return the codes with their scales; columns stay in their order only if groups follow it."""
        codes = self.codes
        if order is not None and not in_order:
            codes = torch.empty_like(codes).index_copy_(0, order, codes)
        if static is not None:
            scale, zero = static
        else:
            scale, zero = torch.cat(self.scales, 1), torch.cat(self.zeros, 1) if self.zeros else None
        return QuantizedWeight.pack(fmt, codes.T.contiguous(), scale, zero, order if in_order else None)


def _block(size: int, fmt: WeightFormat) -> int:
    """Return columns per block, such that groups start where all updates so far have been applied."""
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
    """Return U, upper triangular, with U^T U the inverse of the damped Hessian; fp32 [in, in].

    The Cholesky factor of the Hessian read backwards is U's inverse read backwards: one factorization and
    one triangular inverse, where the paper's inverse and its factorization take three.
    """
    mean = float(gram.diagonal().mean())
    if mean == 0:  # the layer never saw anything but zeros
        return torch.eye(len(gram), device=gram.device)
    backwards = (gram / mean).flip(0, 1)  # scale-free: codes don't depend on the Hessian's size
    diagonal = backwards.diagonal()
    added = 0.0
    for _ in range(_MOST_TRIES):
        diagonal += damping - added
        added = damping
        lower, failed = torch.linalg.cholesky_ex(backwards)
        if not failed:
            unit = torch.eye(len(gram), device=gram.device)
            upper: Tensor = torch.linalg.solve_triangular(lower, unit, upper=False).flip(0, 1)
            if torch.isfinite(upper).all():
                return upper.contiguous()
        _log.warning("%s: the Hessian can't be factorized with damping %g; ten times as much", name, damping)
        damping *= 10
    raise RequestError(
        f"{name}: the Hessian of its inputs can't be factorized, even with damping {added:g}; "
        f"calibrate on more or other text"
    )
