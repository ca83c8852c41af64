"""Simulations of methods from other papers, for comparison with kvq's formats of the same size.

Each method is a pair of quantizers for entire blocks, not registered under a name (see `kvq.formats.own`).
Everything else, such as which queries see quantized tokens, uses the code path that serves requests.
"""

import re
from functools import partial

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats import Code, KVFormat, KVRecipe, LayerFormats
from kvq.formats.names import split_exact
from kvq.formats.spec import Own, Through
from kvq.kernels.codec.hadamard import rotate
from kvq.layout import MAX_BLOCK_SIZE

NAMES = "kivi-kKvV, kvarn-kKvV (K and V bits: 2 to 8; then -gTOKENS, +sinks=N, +recent=N)"
_NAME = re.compile(r"(kivi|kvarn)-k([2-8])v([2-8])(?:-g(\d+))?")
_TOKENS = {"kivi": 32, "kvarn": 128}  # per block, by default
_KIVI_GROUP = 32  # elements of a token's V per scale
_ROUNDS = 16  # of normalization
_PAIR = 32  # bits for a scale and a minimum
_SCALE = 16  # bits


def simulated(name: str, head_dims: list[tuple[int, int]]) -> KVRecipe:  # D44
    """Return the recipe for a name such as `kivi-k2v2+recent=128` or `kvarn-k4v2-g64`.

    Raises:
        ConfigError: the name has another form, or head dimensions differ.
    """
    base, exact = split_exact(name)
    k, v = _formats(base, head_dims)
    layers = (LayerFormats(k=k, v=v, k_head_dim=k_dim, v_head_dim=v_dim) for k_dim, v_dim in head_dims)
    return KVRecipe(layers=tuple(layers), exact=exact, label=f"{base}{exact}")


def _formats(name: str, head_dims: list[tuple[int, int]]) -> tuple[KVFormat, KVFormat]:
    """Return the formats of K and V for a name without sinks and recent tokens."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is no method that can be simulated; those are {NAMES}")
    dims = {dim for pair in head_dims for dim in pair}
    if len(dims) > 1:
        raise ConfigError(f"{name} is simulated for heads of one dimension, this model has {sorted(dims)}")
    family, k, v, dim = match[1], int(match[2]), int(match[3]), dims.pop()
    tokens = int(match[4] or _TOKENS[family])
    if not 1 < tokens <= MAX_BLOCK_SIZE:
        raise ConfigError(f"{name}: a block has 2 to {MAX_BLOCK_SIZE} tokens, got {tokens}")

    def made(through: Through, bits: float) -> KVFormat:
        own = Own(name=name, through=through, bits=lambda dim: bits, tokens=tokens)
        return KVFormat(code=Code.FP32, own=own)

    if family == "kivi":
        return (
            made(partial(_rounded, bits=k, dims=(-2,)), k + _PAIR / tokens),
            made(partial(_rounded_groups, bits=v), v + _PAIR / min(_KIVI_GROUP, dim)),
        )
    return (
        made(partial(_normalized, bits=k, dim=-2), k + _PAIR / tokens + _SCALE / dim),
        made(partial(_normalized, bits=v, dim=-1), v + _PAIR / dim + _SCALE / tokens),
    )


def _rounded(x: Tensor, *, bits: int, dims: tuple[int, ...]) -> Tensor:
    """Round to `bits` bits, with one fp16 scale and one fp16 minimum along `dims`.

    Source: Liu et al. 2024, KIVI, section 3: K along tokens, V along elements.
    """
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    levels = (1 << bits) - 1
    scale = ((high - low) / levels).half().float().clamp(min=torch.finfo(torch.float16).tiny)
    low = low.half().float()
    return ((x - low) / scale).round().clamp(0, levels) * scale + low


def _rounded_groups(x: Tensor, *, bits: int) -> Tensor:
    """Round each token's elements in groups, as KIVI does for V."""
    groups = x.unflatten(-1, (-1, min(_KIVI_GROUP, x.shape[-1])))
    return _rounded(groups, bits=bits, dims=(-1,)).flatten(-2)


def _normalized(x: Tensor, *, bits: int, dim: int) -> Tensor:
    """Rotate, equalize deviations of tokens and elements, round along `dim`, and undo the first two steps.

    Source: Muller et al. 2026, KVarN (arXiv 2606.03458): of 16 rounds, the one with the most even deviations
    is kept.
    """
    rotated = rotate(x)
    scales = _even_scales(rotated).half().float() if dim == -2 else _even_scales(rotated.mT).half().float().mT
    return rotate(_rounded(rotated / scales, bits=bits, dims=(dim,)) * scales)


def _even_scales(x: Tensor) -> Tensor:
    """Return each head's row scales [..., rows, 1] that best equalize the deviations of rows and columns.

    The column scales are absorbed by the rounding scales.
    """
    rows, columns = torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1, :])
    moments = x, x.square()
    turned = x.mT, moments[1].mT
    best, least = rows, torch.full_like(x[..., :1, :1], torch.inf)
    for _ in range(_ROUNDS + 1):
        by_row = _deviations(*moments, columns.mT) / rows
        by_column = (_deviations(*turned, rows) / columns.mT).mT
        uneven = _spread(by_row, -2) + _spread(by_column, -1)
        best = torch.where(uneven < least, rows, best)
        least = torch.minimum(uneven, least)
        rows = rows * by_row
        columns = columns * (_deviations(*turned, rows) / columns.mT).mT
    return best


def _deviations(x: Tensor, squares: Tensor, scales: Tensor) -> Tensor:
    """Return deviations [..., rows, 1] of the rows of `x` divided by column `scales` [..., columns, 1]."""
    count, inverse = x.shape[-1], 1 / scales
    mean, square = x @ inverse / count, squares @ inverse.square() / count
    return ((square - mean.square()) * (count / (count - 1))).clamp(min=1e-6).sqrt()


def _spread(deviations: Tensor, dim: int) -> Tensor:
    """Return the ratio of the largest to the smallest value."""
    return deviations.amax(dim, keepdim=True) / deviations.amin(dim, keepdim=True)
