"""Components of a GPU's memory use: weights, activations and KV, each with its formula."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from kvq.errors import ConfigError
from kvq.formats.checkpoints.stored import Stored
from kvq.geometry import LayerGeometry, ModelGeometry, StateTensor
from kvq.layout import BLOCK_SIZE, KVLayout, named_recipe, plan_layout
from kvq.sizing.held import HeldAs
from kvq.sizing.parameters import Parameters

LINEAR_TERM = "linear weights"
SCALES_TERM = "weight scales"
# D275: on GPUs stacked experts stay unquantized
EXPERTS_TERM = "expert weights"  # stacked in one tensor per layer; kvq quantizes them on CPUs only
KEPT_TERM = "embeddings, head, norms"  # weights that quantizers leave unchanged
ACTIVATION_TERM = "activations"
_RESIDUALS = 4  # hidden vectors of a token that are live while an MLP runs
_GATED = 3  # vectors of an MLP's width that are live then
_GATED_OF = {"phi3": 4, "gpt_oss": 10}  # gates and inputs are one tensor, split and clamped


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One component of a GPU's memory use."""

    name: str
    nbytes: int
    formula: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Number of GPUs over which a model is split."""

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1024:
                raise ConfigError(f"{name} parallel ranks must be 1 to 1024, got {value!r}")

    @property
    def gpus(self) -> int:
        """Total number of GPUs."""
        return self.tensor * self.pipeline


def weight_terms(parameters: Parameters, held: HeldAs) -> tuple[Term, ...]:
    """Return the weight components of the complete model, in the forms in which an engine stores them."""
    rest = Counter({held.other: parameters.tables + parameters.other})
    if not held.is_shared(parameters):
        rest[held.embedding or held.other] += parameters.embedding
    kept = _sum(KEPT_TERM, [(n, one.weight_bytes, f" ({one.name})") for one, n in rest.items()])
    head, form = held.held_head(parameters)
    linear, experts, scales = Counter[Stored](), Counter[Stored](), Counter[float]()
    for name, count, rows in parameters.each:
        is_expert = ".experts." in name
        own = held.of(name) if held.has_packed_experts or not is_expert else held.other
        (experts if is_expert else linear)[own] += count
        scales[own.scale_bytes] += round(own.num_scales(count, rows))
    terms = [
        _sum(LINEAR_TERM, [(n, one.weight_bytes, f" ({one.name})") for one, n in linear.items()]),
        _sum(SCALES_TERM, [(n, each, "") for each, n in scales.items()]),
        _sum(EXPERTS_TERM, [(n, one.weight_bytes, f" ({one.name})") for one, n in experts.items()]),
        replace(
            kept,
            nbytes=kept.nbytes + head,
            formula=kept.formula + (f" + {head:,} B (head, {form})" if head else ""),
        ),
    ]
    return tuple(term for term in terms if term.nbytes)


def _sum(name: str, parts: list[tuple[int, float, str]]) -> Term:
    """Return the term for the sum over parts (count, bytes each, note)."""
    return Term(
        name=name,
        nbytes=round(sum(count * each for count, each, _ in parts)),
        formula=" + ".join(f"{count:,} x {each:g} B{what}" for count, each, what in parts if count and each),
    )


def on_one_gpu(terms: tuple[Term, ...], geometry: ModelGeometry, split: Split) -> tuple[Term, ...]:
    """Return the weights of the fullest GPU: a tensor-parallel share of the longest pipeline stage.

    This GPU is assumed to have the complete embedding and head, which are on the first and last stages.
    """
    if split.gpus == 1:
        return terms
    layers = geometry.last_layer + 1
    stage = -(-layers // split.pipeline)

    def own(term: Term) -> Term:
        whole = term.name == KEPT_TERM  # a GPU with a share has all of them
        share = (1 if whole else stage / layers) / split.tensor
        what = ("" if whole else f" x {stage}/{layers} layers") + f" / {split.tensor}"
        return replace(term, nbytes=round(term.nbytes * share), formula=term.formula + what)

    return tuple(map(own, terms))


def split_geometry(geometry: ModelGeometry, split: Split) -> ModelGeometry:
    """Return the geometry of the fullest GPU: its KV heads, states and layers.

    KV heads that can't be divided evenly are replicated on several GPUs, and latent vectors on all GPUs.
    Recurrent states are split by heads or channels. Layers that share K and V are assumed to be on the GPU
    that stores them.

    Raises:
        ConfigError: there are more stages than layers, or the ranks can't share query heads evenly.
    """
    layers = geometry.last_layer + 1
    if split.pipeline > layers:
        raise ConfigError(f"{split.pipeline} pipeline stages for {layers} layers; at most {layers}")
    if geometry.q_heads % split.tensor:
        fits = [n for n in range(1, geometry.q_heads + 1) if geometry.q_heads % n == 0]
        raise ConfigError(
            f"{geometry.q_heads} query heads can't be shared by {split.tensor} GPUs; use one of {fits}"
        )
    if split.gpus == 1:
        return geometry
    size = -(-layers // split.pipeline)
    stages = [range(first, first + size) for first in range(0, layers, size)]
    numbers = max(stages, key=lambda stage: sum(x.elements_per_token for x in _within(geometry, stage)))
    own = [
        replace(layer, index=i, kv_heads=-(-layer.kv_heads // split.tensor), readers=())
        for i, layer in enumerate(_within(geometry, numbers))
    ]
    states = [replace(x, tensors=tuple(_share(t, split.tensor) for t in x.tensors)) for x in geometry.states]
    return replace(
        geometry,
        layers=tuple(own),
        q_heads=geometry.q_heads // split.tensor,
        states=tuple(state for state in states if state.number in numbers),
    )


def _within(geometry: ModelGeometry, numbers: range) -> list[LayerGeometry]:
    """Return the layers in a pipeline stage."""
    return [layer for layer in geometry.layers if layer.number in numbers]


def _share(tensor: StateTensor, ranks: int) -> StateTensor:
    """Return one rank's share of a state tensor, whose first dimension is heads or channels."""
    return replace(tensor, shape=(-(-tensor.shape[0] // ranks), *tensor.shape[1:]))


def kv_layout(
    geometry: ModelGeometry, kv: str, *, block_size: int = BLOCK_SIZE, whole_blocks: bool = True
) -> KVLayout:
    """Return the block layout used by an engine; `kv` is a format or the path of a recipe file.

    `whole_blocks`: as for `KVRecipe.uniform`; False for engines that quantize every token immediately.
    """
    named = Path(kv) if kv.endswith(".json") else kv
    recipe = named_recipe(named, geometry, whole_blocks=whole_blocks)
    recipe.check_stored("a plan")
    return plan_layout(geometry, recipe, block_size=block_size)


def activation_term(
    geometry: ModelGeometry, parameters: Parameters | None, *, step_tokens: int, split: Split
) -> Term:
    """Return the peak activation memory of a prefill step, reached while an MLP runs, in 16 bits.

    The engine measures this peak before it sizes its pools. Without `parameters`, an MLP is assumed to be
    four times as wide as the model.
    """
    inner = 4 * geometry.hidden_size if parameters is None else parameters.inner
    gated = _GATED_OF.get(geometry.model_type, _GATED)
    each = 2 * (_RESIDUALS * geometry.hidden_size + gated * inner // split.tensor)
    return Term(
        name=ACTIVATION_TERM,
        nbytes=step_tokens * each,
        formula=f"{step_tokens} tokens x ({_RESIDUALS} x {geometry.hidden_size} + {gated} x {inner}"
        + (f" / {split.tensor}" if split.tensor > 1 else "")
        + ") x 2 B",
    )
