"""The heads that a layer's QKV product gives, and what is done to them before attention."""

from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.rms_norm.weight import NormWeight


class Pairs(IntEnum):  # D145: three rules of pairs; one bool would misread GLM
    """Pairs of a head's elements that are turned together, and the column of the angles that says how far."""

    HALVES = 0  # i and i + rotary_dim / 2, by column i: Llama and most, GPT-OSS
    NEIGHBOURS = 1  # 2 i and 2 i + 1, by column i: GLM
    NEIGHBOURS_TWICE = 2  # 2 i and 2 i + 1, by column 2 i, since every angle stands there twice: Cohere


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerHeads:
    """A layer's heads side by side: queries, keys, values; one object for all steps.

    `norms`: of queries and keys, before they are turned. A weight [k_dim] norms every head, one of all
    heads' elements [heads * k_dim] all of them at once (OLMo 2).
    """

    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    rotary_dim: int = 0  # the first elements of a head, which are turned; 0: none
    pairs: Pairs = Pairs.HALVES
    norms: tuple[NormWeight, NormWeight] | None = None
    bias: Tensor | None = None  # [width], of the heads' dtype
    centers: tuple[Tensor | None, Tensor | None] = (None, None)  # fp32 [kv_heads, dim], off K and V stored
    width: int = field(init=False)  # elements of all heads
    angle_columns: int = field(init=False)  # that are read

    @property
    def counts(self) -> list[int]:
        """Heads of queries, keys and values."""
        return [self.q_heads, self.kv_heads, self.kv_heads]

    def __post_init__(self) -> None:
        """Raises:
        ConfigError: sizes that don't fit each other: kernels would read past their ends.
        """
        # kernels are launched often, so these are worked out once
        object.__setattr__(
            self, "width", self.q_heads * self.k_dim + self.kv_heads * (self.k_dim + self.v_dim)
        )
        halved = 1 if self.pairs is Pairs.NEIGHBOURS_TWICE else 2
        object.__setattr__(self, "angle_columns", self.rotary_dim // halved)
        turned = self.rotary_dim % 2 == 0 and 0 <= self.rotary_dim <= self.k_dim
        norms = zip(self.norms or (), (self.q_heads, self.kv_heads), strict=False)
        weights = [n.weight.shape in ((self.k_dim,), (heads * self.k_dim,)) for n, heads in norms]
        biased = self.bias is None or self.bias.shape == (self.width,)
        centers = zip(self.centers, (self.k_dim, self.v_dim), strict=True)
        centered = [c is None or c.shape == (self.kv_heads, dim) for c, dim in centers]
        if not (turned and biased and all(weights) and all(centered)):
            raise ConfigError(
                f"norms, bias, centers or rotary_dim={self.rotary_dim} don't fit {self.q_heads} and "
                f"{self.kv_heads} heads with K of {self.k_dim} and V of {self.v_dim} elements"
            )
