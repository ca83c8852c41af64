"""`kvq.load` and the model it returns."""

import logging
import operator
from pathlib import Path
from typing import Any, Unpack

import torch

from kvq.errors import RequestError, first_lines
from kvq.formats import KVRecipe, StaticScales
from kvq.formats.weights import WeightCode, WeightFormat
from kvq.geometry import ModelGeometry
from kvq.kernels import Device, LinearSpec, select
from kvq.layout import KVLayout
from kvq.models.describe.resolve import ModelSource
from kvq.models.loading.fused_layers import fuse_layers, unfuse_layers
from kvq.models.loading.prepared import LoadOptions, PreparedModel, find_scales, prepare
from kvq.models.loading.weights import LoadedWeights, load_weights
from kvq.models.parts.fork_guard import NotCopyable
from kvq.models.parts.inputs import check_token_ids
from kvq.models.prove.exactness import check_exact
from kvq.models.prove.probe import probe
from kvq.models.prove.proof import prove
from kvq.models.run.session import Session
from kvq.sizes import count
from kvq.weights import weight_count, weight_formats

_log = logging.getLogger("kvq")


class Model(NotCopyable):
    """A model whose KV cache is stored in blocks of one recipe."""

    def __init__(
        self, weights: LoadedWeights, recipe: KVRecipe, *, static_scales: StaticScales | None = None
    ) -> None:
        """`static_scales`: scales for every static recipe passed to `with_kv` without scales."""
        self.weights = weights
        self.recipe = recipe
        self.static_scales = static_scales

    @property
    def prepared(self) -> PreparedModel:
        """Description of the model, as prepared before its weights were loaded."""
        return self.weights.prepared

    @property
    def geometry(self) -> ModelGeometry:
        """Layers, heads, head dimensions, windows."""
        return self.weights.geometry

    @property
    def description(self) -> str:
        """Family and size, for reports."""
        size = count(weight_count(self.weights.model))
        formats = sorted(fmt.name for fmt in weight_formats(self.weights.model))
        stored = f", weights in {', '.join(formats)}" if formats else ""
        return f"{self.geometry.model_type}, {size} parameters{stored}"

    @property
    def title(self) -> str:
        """Name, family and size, for reports."""
        return f"{self.prepared.source.name} ({self.description})"

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.prepared.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text; empty if no file of the model lists any."""
        return self.prepared.end_ids

    @property
    def layout(self) -> KVLayout:
        """Positions of codes and scales inside a block."""
        return self.prepared.layout(self.recipe)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes per token over all layers, with scales and padding; as declared for registered formats."""
        if self.recipe.own:
            return self.bits_per_element * self.geometry.elements_per_token / 8
        return self.layout.kv_bytes_per_token

    @property
    def bits_per_element(self) -> float:
        """Stored bits per K or V element, with scales and block means; as declared for registered formats."""
        return float(self.recipe.bits_per_element(self.geometry.kv_heads, self.layout.block_size))

    def bits_held(self, tokens: int) -> float:
        """Return the bits per element that a sequence of `tokens` tokens takes up, staged tokens included."""
        layout, elements = self.layout, tokens * self.geometry.elements_per_token
        if self.recipe.own:
            waiting = sum(group.sequence_bytes(tokens) for group in layout.groups if group.is_staging)
            blocks = -(-tokens // layout.block_size) * layout.block_size
            return self.bits_per_element * blocks / tokens + 8 * waiting / elements
        return 8 * sum(group.sequence_bytes(tokens) for group in layout.attended) / elements

    def with_kv(self, kv: str | Path | KVRecipe) -> "Model":
        """Return a model with the same weights and another KV recipe; nothing is loaded again.

        Raises:
            ConfigError: the format is unknown or doesn't fit, or its static scales are missing or wrong.
        """
        return self._with(self.prepared.recipe(kv, self.static_scales), self.static_scales)

    def with_static_scales(self, scales: StaticScales) -> "Model":
        """Return this model with other static scales, for its recipe and for recipes passed to `with_kv`."""
        return self._with(self.recipe.with_scales(scales) if self.recipe.is_static else self.recipe, scales)

    def check_scales(self) -> None:
        """Raise ConfigError if the recipe lacks its static scales or contains another model's data."""
        self.prepared.check_scales(self.recipe)

    def check_exact(self) -> None:
        """Raise ModelError if the model was loaded as exact, and its results depend on the batch."""
        if self.prepared.exact:
            check_exact(self.weights, self.layout)

    def _with(self, recipe: KVRecipe, scales: StaticScales | None) -> "Model":
        other = Model(self.weights, recipe, static_scales=scales)
        other.check_scales()
        other.check_exact()
        return other

    def session(self, *, max_tokens: int, max_sequences: int = 1) -> Session:
        """Return a session with pools for `max_sequences` sequences of up to `max_tokens` tokens each."""
        self.check_scales()
        return Session(self.weights, self.layout, max_tokens=max_tokens, max_sequences=max_sequences)

    def logits(self, token_ids: list[int], *, chunk: int | None = None) -> torch.Tensor:
        """Return the logits after every token, fp32 [tokens, vocab], computed with quantized KV.

        `chunk`: split the prefill into chunks of this many tokens.

        Raises:
            RequestError: there are no tokens or too many for the model's context, an id is outside the
                vocabulary, or K or V values are not finite.
        """
        check_token_ids(token_ids, "token ids are whole numbers in a list")
        token_ids = [operator.index(token) for token in token_ids]
        if not token_ids:
            raise RequestError("no tokens were given; logits need at least one")
        if chunk is not None and chunk < 1:
            raise RequestError(f"chunk must be at least 1 token, got {chunk}")
        session = self.session(max_tokens=len(token_ids))
        sequence = session.new_sequence()
        size = chunk or len(token_ids)
        parts = []
        for at in range(0, len(token_ids), size):
            result = session.forward([(sequence, token_ids[at : at + size])], all_rows=True)[0]
            parts.append(result.trusted_logits())
        return torch.cat(parts)


def load(
    path_or_name: str | Path | ModelSource,
    kv: str | Path | KVRecipe = "auto",
    *,
    scales: str | Path | None = None,
    **options: Unpack[LoadOptions],
) -> Model:
    """Load a model and choose its KV format.

    `path_or_name`: a Hugging Face folder; a hub name; "tiny" for the embedded model, or "tiny-draft" for its
    draft model. A `Path` is always a folder. `kv`: a format name, a pair of names, a kvq.json or a KVRecipe;
    "auto" means the model's dtype. `scales`: a kvq.json with static scales; a kvq.json in the model folder is
    found automatically. A static format without scales is rejected on first use. `options`: see
    `LoadOptions`.

    Raises:
        ModelError: the model is missing, damaged or unsupported.
        ConfigError: an option can't be used as given.
    """
    prepared = prepare(path_or_name, **options)
    static = find_scales(prepared, scales)
    return load_prepared(prepared, prepared.recipe(kv, static), static)


def load_prepared(prepared: PreparedModel, recipe: KVRecipe, scales: StaticScales | None = None) -> Model:
    """Load a model whose files and options have been checked.

    Raises:
        ModelError: the weights are damaged, or kvq would run the model incorrectly.
        UnsupportedKernel: no kernel on this machine runs the recipe.
    """
    prepared.layout(recipe)
    if not recipe.is_static or recipe.static_scales is not None:
        prepared.check_kernels(recipe)
    prove(prepared)
    weights = load_weights(prepared)
    _log.info("checking the model against its own attention")
    probe_layers(weights)
    model = Model(weights, recipe, static_scales=scales)
    if not recipe.is_static or recipe.static_scales is not None:
        model.check_exact()
    return model


def runs_in_triton(prepared: PreparedModel) -> bool:
    """Return True if a model's kernels, and so its fused layers, can run in Triton."""
    spec = LinearSpec(fmt=WeightFormat(code=WeightCode.INT8), in_features=1, out_features=1)
    device = Device.of(prepared.device)
    return device.type != "cpu" and select(spec.operation, spec, device, prepared.backend).is_triton


def probe_layers(weights: LoadedWeights) -> None:
    """Probe the model with fused layers if possible; if that fails, unfuse the layers and probe again.

    Raises:
        ModelError: see `probe`.
    """
    windows = [layer.window for layer in weights.geometry.layers]
    if fuse_layers(weights.model, windows, in_triton=runs_in_triton(weights.prepared)):
        try:
            return probe(weights)
        except Exception as error:  # noqa: BLE001 - kernels may raise anything on an unfamiliar device
            _log.warning("layers run in the model's own code: %s", first_lines(error))
            unfuse_layers(weights.model)
            weights.forget_rows()
    return probe(weights)
