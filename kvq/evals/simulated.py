"""Methods of others, simulated: what they would lose at their bytes, measured beside kvq's formats.

Blocks of a simulated method hold what its codes would be read back as, in fp32; how tokens come in, which
queries see which form of them, and everything else is the path that serves. Nothing of it can be served.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from kvq.cache.kv_cache import KVCache
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.formats.names import split_exact
from kvq.kernels.codec.hadamard import rotate
from kvq.kernels.seal.reference import seal
from kvq.layout import MAX_BLOCK_SIZE, KVLayout, plan_layout
from kvq.models import Model, Session
from kvq.models.prepared import PreparedModel

NAMES = "kivi-kKvV, kvarn-kKvV (K and V bits: 2 to 8; then -gTOKENS, +sinks=N, +recent=N)"
_NAME = re.compile(r"(kivi|kvarn)-k([2-8])v([2-8])(?:-g(\d+))?")
_TOKENS = {"kivi": 32, "kvarn": 128}  # of a block, unless said
_KIVI_GROUP = 32  # elements of a token's V with one scale
_ROUNDS = 16  # of normalization
_PAIR = 32  # bits of a scale and a minimum
_SCALE = 16  # bits
Codec = Callable[[Tensor], Tensor]  # fp32 [..., tokens, dim] -> what is read back of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How a method stores the blocks of a model with heads of one dimension."""

    k: Codec
    v: Codec
    tokens: int  # of a block
    k_bits: float  # an element, scales included
    v_bits: float


@dataclass(frozen=True, kw_only=True)
class SimulatedRecipe(KVRecipe):
    """A recipe for blocks in fp32, that a method's codec goes over."""

    method: Method

    @property
    def is_quantized(self) -> bool:
        return True

    @classmethod
    def of(cls, name: str, head_dims: list[tuple[int, int]]) -> "SimulatedRecipe":
        """The recipe of a name such as `kivi-k2v2+recent=128` or `kvarn-k4v2-g64`.

        Raises:
            ConfigError: another name, or heads of several dimensions.
        """
        base, exact = split_exact(name)
        method = _method(base, head_dims)
        layers = KVRecipe.uniform("fp32", head_dims).layers
        return cls(layers=layers, exact=exact, label=f"{base}{exact}", method=method)

    @property
    def is_staged(self) -> bool:
        """A block needs all of its tokens, even if no others are exact."""
        return True


class SimulatedModel(Model):
    """A model whose sealed blocks went through the codec of its recipe's method."""

    recipe: SimulatedRecipe

    @property
    def layout(self) -> KVLayout:
        return layout_in(self.prepared, self.recipe)

    @property
    def bits_per_element(self) -> float:
        method = self.recipe.method
        return (method.k_bits + method.v_bits) / 2

    @property
    def kv_bytes_per_token(self) -> float:
        return self.bits_per_element * self.geometry.elements_per_token / 8

    def bits_held(self, tokens: int) -> float:
        layout = self.layout
        waiting = sum(x.sequence_bytes(tokens) for x in layout.groups if x.is_staging)
        blocks = -(-tokens // layout.block_size) * layout.block_size
        waiting_bits = 8 * waiting / (tokens * self.geometry.elements_per_token)
        return self.bits_per_element * blocks / tokens + waiting_bits

    def session(self, *, max_tokens: int, max_sequences: int = 1) -> Session:
        found = super().session(max_tokens=max_tokens, max_sequences=max_sequences)
        method = self.recipe.method
        cast(KVCache, found.cache).seal_by(partial(seal, through=(method.k, method.v)))
        return found


def model_in(model: Model, kv: str | KVRecipe) -> Model:
    """The model in a format, or as a method that is simulated would store it.

    Raises:
        ConfigError: see `Model.with_kv`.
    """
    if isinstance(kv, SimulatedRecipe):
        return SimulatedModel(model.weights, kv)
    return model.with_kv(kv)


def layout_in(model: PreparedModel, recipe: KVRecipe) -> KVLayout:
    """The blocks of a format, or of a method that is simulated; needs no weights.

    Raises:
        ConfigError: a recipe made for other layers.
    """
    if isinstance(recipe, SimulatedRecipe):
        return plan_layout(model.geometry, recipe, block_size=recipe.method.tokens, order=model.order)
    return model.layout(recipe)


def _method(name: str, head_dims: list[tuple[int, int]]) -> Method:
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
    if family == "kivi":
        return Method(
            k=partial(_rounded, bits=k, dims=(-2,)),
            v=partial(_rounded_groups, bits=v),
            tokens=tokens,
            k_bits=k + _PAIR / tokens,
            v_bits=v + _PAIR / min(_KIVI_GROUP, dim),
        )
    return Method(
        k=partial(_normalized, bits=k, dim=-2),
        v=partial(_normalized, bits=v, dim=-1),
        tokens=tokens,
        k_bits=k + _PAIR / tokens + _SCALE / dim,
        v_bits=v + _PAIR / dim + _SCALE / tokens,
    )


def _rounded(x: Tensor, *, bits: int, dims: tuple[int, ...]) -> Tensor:
    """Rounded to `bits` with one scale and minimum, in fp16, along some dimensions.

    Source: K along tokens, V along elements: Liu et al. 2024, KIVI, section 3.
    """
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    levels = (1 << bits) - 1
    scale = ((high - low) / levels).half().float().clamp(min=torch.finfo(torch.float16).tiny)
    low = low.half().float()
    return ((x - low) / scale).round().clamp(0, levels) * scale + low


def _rounded_groups(x: Tensor, *, bits: int) -> Tensor:
    """By groups of a token's elements."""
    groups = x.unflatten(-1, (-1, min(_KIVI_GROUP, x.shape[-1])))
    return _rounded(groups, bits=bits, dims=(-1,)).flatten(-2)


def _normalized(x: Tensor, *, bits: int, dim: int) -> Tensor:
    """Rotated, deviations of tokens and of elements made alike, rounded along `dim`, and all of it undone.

    Source: Muller et al. 2026, KVarN (arXiv 2606.03458): 16 rounds, of which the most even one is kept.
    """
    rotated = rotate(x)
    scales = _even_scales(rotated).half().float() if dim == -2 else _even_scales(rotated.mT).half().float().mT
    return rotate(_rounded(rotated / scales, bits=bits, dims=(dim,)) * scales)


def _even_scales(x: Tensor) -> Tensor:
    """Per head the scale of every row, [..., rows, 1], that columns and rows are most alike with.

    The scales of columns go into those that are rounded with anyway.
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
    """Of every row of `x` over the scales [..., columns, 1] of its columns, [..., rows, 1]."""
    count, inverse = x.shape[-1], 1 / scales
    mean, square = x @ inverse / count, squares @ inverse.square() / count
    return ((square - mean.square()) * (count / (count - 1))).clamp(min=1e-6).sqrt()


def _spread(deviations: Tensor, dim: int) -> Tensor:
    """How far they lie apart: the largest over the least."""
    return deviations.amax(dim, keepdim=True) / deviations.amin(dim, keepdim=True)
