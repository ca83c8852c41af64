"""Step costs for `--calibrate`: the time of each part of a step, fitted to the times of many steps."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from kvq.capacity.plan.step_time import read_share
from kvq.engine import StepStats
from kvq.errors import ConfigError
from kvq.models import Model
from kvq.sizing.parameters import Parameters, count_parameters
from kvq.weights import weight_bytes

_LEAST = 4  # minimum number of steps near a number of tokens for a separate point
_FEWEST_STEPS = 32
_ROUNDS = 12
_NEGLIGIBLE = 0.02  # relative error


def fit_costs(steps: Sequence[StepStats], model: Model) -> dict[str, Any] | None:
    """Fit step costs in the form that `kvq.capacity.plan.step_time` reads; None if steps are too few.

    Also returns None for models with sliding windows (decodes see fewer tokens than are counted here) or
    experts (steps with more tokens read more experts), and for families whose parameters are not counted.

    The fit minimizes relative errors without negative costs. The cost of linear layers is linear between
    powers of two tokens. Decode costs depend on the tokens that decodes see, prefill costs on query-key
    pairs, and each sequence adds a constant.
    """
    layout, geometry = model.layout, model.geometry
    parameters = None
    with suppress(ConfigError):
        parameters = count_parameters(model.prepared.config, geometry)
    slides = any(group.group.window is not None and not group.is_staging for group in layout.groups)
    if len(steps) < _FEWEST_STEPS or slides or parameters is None or parameters.experts:
        return None
    rows = [step.decode_tokens + step.prefill_tokens for step in steps]
    knots = _knots(rows)
    features = torch.tensor(
        [
            [*_hats(count, knots), step.decode_context, step.prefill_context, step.sampled]
            for count, step in zip(rows, steps, strict=True)
        ],
        dtype=torch.float64,
    )
    seconds = torch.tensor([step.seconds for step in steps], dtype=torch.float64)
    found = _fit(features / seconds[:, None], torch.ones_like(seconds))
    linear, (read_s, pair_s, sequence_s) = found[: len(knots)], found[len(knots) :]
    if min(linear) <= 0:
        return None
    heads = sum(layer.k_head_dim + layer.v_head_dim for layer in geometry.layers)
    return {
        "linear": [[knot, cost] for knot, cost in zip(knots, linear, strict=True)],
        "read_s": read_s,
        "pair_s": pair_s,
        "sequence_s": sequence_s,
        "weight_bytes": read_bytes(model, parameters),
        "token_flops": 2 * parameters.active,
        "kv_bytes": layout.kv_bytes_per_token,
        "pair_flops": 2 * geometry.q_heads * heads,
    }


def read_bytes(model: Model, parameters: Parameters) -> float:
    """Return the bytes of weights read by a step of one token."""
    return weight_bytes(model.weights.model) * read_share(parameters, 1)


def _knots(rows: Sequence[int]) -> list[int]:
    """Return the powers of two with enough steps near them."""
    powers = [1 << i for i in range(max(rows).bit_length() + 1)]
    near = [power for power in powers if sum(power / 1.5 < n <= power * 1.5 for n in rows) >= _LEAST]
    return near or [sorted(rows)[len(rows) // 2]]


def _hats(count: int, knots: Sequence[int]) -> list[float]:
    """Return the weight of each knot for `count` tokens, linear between knots and beyond the last knot."""
    hats = [0.0] * len(knots)
    if len(knots) == 1 or count <= knots[0]:
        hats[0] = 1.0
        return hats
    after = next((i for i, knot in enumerate(knots) if knot >= count), len(knots) - 1)
    before = max(0, after - 1)
    way = (count - knots[before]) / (knots[after] - knots[before])
    hats[before], hats[after] = 1.0 - way, way
    return hats


def _fit(features: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Fit with least absolute errors, by iteratively reweighted least squares.

    As a result, a step that waited for kernel compilation or another process does not outweigh the others.
    """
    weights = torch.ones_like(target)
    costs: list[float] = []
    for _ in range(_ROUNDS):
        costs = _without_negatives(features * weights[:, None], target * weights)
        off = (features @ torch.tensor(costs, dtype=features.dtype) - target).abs()
        weights = off.clamp(min=_NEGLIGIBLE).rsqrt()
    return costs


def _without_negatives(features: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Fit by least squares, removing features with negative costs one by one."""
    scale = features.abs().amax(0).clamp(min=1e-300)
    kept = list(range(features.shape[1]))
    while True:
        found = torch.linalg.lstsq(features[:, kept] / scale[kept], target[:, None], driver="gelsd").solution
        values = (found[:, 0] / scale[kept]).tolist()
        worst = min(range(len(kept)), key=lambda i: found[i, 0].item())
        if found[worst, 0] >= 0:
            break
        del kept[worst]
    costs = [0.0] * features.shape[1]
    for i, value in zip(kept, values, strict=True):
        costs[i] = value
    return costs
