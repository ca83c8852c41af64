"""What fills a GPU, term by term, each with the formula that it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvq.capacity.plan.parameters import Parameters
from kvq.errors import ConfigError, nearest
from kvq.formats import KVRecipe
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.layout import KVLayout, plan_layout

# Bytes of a weight in the linear layers; scales beside them are `_SCALE_BYTES`.
WEIGHT_BYTES: Mapping[str, float] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "int3": 0.375,
    "nf4": 0.5,
}  # fmt: skip
_SCALE_BYTES: Mapping[str, tuple[float, int]] = {
    "int4": (2.5, 128),
    "int3": (2.5, 128),
    "nf4": (1.0, 64),
}  # of a group, weights of it
KEPT_TERM = "embeddings, head, norms"  # what quantizers leave as it is
_LIVE_VALUES = 6  # hidden vectors of a token that a layer's step holds at once, roughly


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One part of a GPU's memory."""

    name: str
    nbytes: int
    formula: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Over how many GPUs a model is spread."""

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1024:
                raise ConfigError(f"{name} parallel ranks must be 1 to 1024, got {value!r}")

    @property
    def gpus(self) -> int:
        """In all."""
        return self.tensor * self.pipeline


def weight_terms(parameters: Parameters, weights: str, *, dtype: str = "fp16") -> tuple[Term, ...]:
    """The whole model's: packed linear layers, and what stays in `dtype`.

    Raises:
        ConfigError: no such weight format.
    """
    packed, plain = _weight_bytes(weights), _weight_bytes(dtype)
    kept = parameters.embedding + parameters.head + parameters.other
    terms = [
        Term(
            name="linear weights",
            nbytes=round(parameters.linear * packed),
            formula=f"{parameters.linear:,} x {packed:g} B ({weights})",
        ),
        Term(
            name=KEPT_TERM,
            nbytes=round(kept * plain),
            formula=f"{kept:,} x {plain:g} B ({dtype})",
        ),
    ]
    if weights in _SCALE_BYTES:
        each, group = _SCALE_BYTES[weights]
        scales = Term(
            name="weight scales",
            nbytes=round(parameters.linear / group * each),
            formula=f"{parameters.linear:,} / {group} x {each:g} B",
        )
        terms.insert(1, scales)
    return tuple(terms)


def _weight_bytes(name: str) -> float:
    if name not in WEIGHT_BYTES:
        raise ConfigError(
            f"weights must be one of {', '.join(WEIGHT_BYTES)}, got {name!r}"
            f"{nearest(name, list(WEIGHT_BYTES))}"
        )
    return WEIGHT_BYTES[name]


def on_one_gpu(terms: tuple[Term, ...], geometry: ModelGeometry, split: Split) -> tuple[Term, ...]:
    """Weights of the fullest GPU: a tensor-parallel share of the longest pipeline stage.

    The embedding and the head are taken to be on it whole: they are on the first and the last stage.
    """
    if split.gpus == 1:
        return terms
    layers = len(geometry.layers)
    stage = -(-layers // split.pipeline)

    def own(term: Term) -> Term:
        whole = term.name == KEPT_TERM
        share = (1 if whole else stage / layers) / split.tensor
        what = ("" if whole else f" x {stage}/{layers} layers") + f" / {split.tensor}"
        return replace(term, nbytes=round(term.nbytes * share), formula=term.formula + what)

    return tuple(map(own, terms))


def split_geometry(geometry: ModelGeometry, split: Split) -> ModelGeometry:
    """The KV heads and layers of the fullest GPU; heads that don't go around are held by several GPUs.

    Raises:
        ConfigError: more stages than layers, or query heads that the ranks can't share.
    """
    layers = len(geometry.layers)
    if split.pipeline > layers:
        raise ConfigError(f"{split.pipeline} pipeline stages for {layers} layers; at most {layers}")
    if geometry.q_heads % split.tensor:
        fits = [n for n in range(1, geometry.q_heads + 1) if geometry.q_heads % n == 0]
        raise ConfigError(
            f"{geometry.q_heads} query heads can't be shared by {split.tensor} GPUs; use one of {fits}"
        )
    stage = geometry.layers[: -(-layers // split.pipeline)]
    own = tuple(replace(layer, kv_heads=_own_heads(layer, split.tensor)) for layer in stage)
    return replace(geometry, layers=own, q_heads=geometry.q_heads // split.tensor)


def _own_heads(layer: LayerGeometry, ranks: int) -> int:
    return max(1, -(-layer.kv_heads // ranks))


def kv_layout(geometry: ModelGeometry, kv: str, *, block_size: int = 32) -> KVLayout:
    """The blocks as the engine lays them out; `kv` is a format or a recipe's file."""
    recipe = KVRecipe.load(kv) if kv.endswith(".json") else KVRecipe.uniform(kv, geometry.head_dims)
    return plan_layout(geometry, recipe, block_size=block_size)


def activation_term(geometry: ModelGeometry, *, step_tokens: int, sequences: int, split: Split) -> Term:
    """What a step holds beside weights and KV, estimated."""
    hidden = step_tokens * geometry.hidden_size * _LIVE_VALUES * 2
    logits = sequences * geometry.vocab_size * 4 // split.tensor
    return Term(
        name="activations, logits",
        nbytes=hidden + logits,
        formula=f"{step_tokens} tokens x {geometry.hidden_size} x {_LIVE_VALUES} x 2 B + "
        f"{sequences} x {geometry.vocab_size} x 4 B" + (f" / {split.tensor}" if split.tensor > 1 else ""),
    )
