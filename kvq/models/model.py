"""`kvq.load` and the model it returns."""

import copy
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvq.cache.backend import cache_backend
from kvq.errors import ConfigError, ModelError, RequestError
from kvq.formats import KVRecipe, StaticScales
from kvq.geometry import ModelGeometry
from kvq.kernels import check_backend
from kvq.layout import BlockOrder, KVLayout, check_recipe_fits, plan_layout
from kvq.models.fused_layers import fuse_layers, unfuse_layers
from kvq.models.probe import probe
from kvq.models.resolve import resolve_model
from kvq.models.session import Session, check_kernels_unnamed
from kvq.models.weights import LoadedWeights, load_weights
from kvq.weights import quantized_layers, weight_count

_UNQUANTIZED = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Model:
    """A model whose KV cache lies in blocks of one recipe."""

    def __init__(
        self,
        weights: LoadedWeights,
        recipe: KVRecipe,
        *,
        static_scales: StaticScales | None = None,
        block_size: int = 32,
        order: BlockOrder = BlockOrder.LAYER_MAJOR,
        backend: str = "auto",
        cache: str = "kvq",
    ) -> None:
        """`static_scales` go to every static recipe that brings none of its own."""
        self.weights = weights
        self.static_scales = static_scales
        self.block_size = block_size
        self.order = order
        self.backend = backend
        self.cache = cache
        self.recipe = self._with_scales(recipe)

    @property
    def geometry(self) -> ModelGeometry:
        """Layers, heads, head dimensions, windows."""
        return self.weights.geometry

    @property
    def description(self) -> str:
        """Family and size, for reports."""
        count = weight_count(self.weights.model)
        formats = sorted({layer.fmt.name for layer in quantized_layers(self.weights.model).values()})
        stored = f", weights in {', '.join(formats)}" if formats else ""
        return f"{self.geometry.model_type}, {count / 1e6:,.1f} M parameters{stored}"

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.weights.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text, as the model's generation config names them."""
        config = getattr(self.weights.model, "generation_config", None) or self.weights.model.config
        end = getattr(config, "eos_token_id", None)
        if end is None:
            return frozenset()
        return frozenset(map(int, end)) if isinstance(end, list | tuple) else frozenset((int(end),))

    @property
    def layout(self) -> KVLayout:
        """Where codes and scales lie inside a block."""
        return plan_layout(self.geometry, self.recipe, block_size=self.block_size, order=self.order)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache per token over all layers, scales and padding included."""
        return self.layout.kv_bytes_per_token

    @property
    def bits_per_element(self) -> float:
        """Stored bits per K or V element, scales included."""
        return float(self.recipe.bits_per_element(self.geometry.kv_heads))

    def with_kv(self, kv: str | Path | KVRecipe) -> "Model":
        """The same weights with another KV recipe; nothing is loaded again.

        Raises:
            ConfigError: unknown format, one that doesn't fit, or static scales missing or foreign.
        """
        other = copy.copy(self)
        other.recipe = self._with_scales(resolve_recipe(self.weights, kv))
        other.check_scales()
        return other

    def with_static_scales(self, scales: StaticScales) -> "Model":
        """The same model with other static scales, for this recipe and those of `with_kv`."""
        other = copy.copy(self)
        other.static_scales = scales
        other.recipe = self.recipe.with_scales(scales) if self.recipe.is_static else self.recipe
        other.check_scales()
        return other

    def check_scales(self) -> None:
        """Raise ConfigError if the recipe's static scales are missing, or anything in it another model's."""
        self.recipe.check_scales(model_digest=self.weights.digest, kv_heads=self.geometry.kv_heads)

    def _with_scales(self, recipe: KVRecipe) -> KVRecipe:
        if recipe.is_static and recipe.static_scales is None:
            return recipe.with_scales(self.static_scales)
        return recipe

    def session(self, *, max_tokens: int, max_sequences: int = 1) -> Session:
        """Pools for `max_sequences` sequences of up to `max_tokens` tokens, and steps over them."""
        self.check_scales()
        return Session(
            self.weights,
            self.recipe,
            self.layout,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            backend=self.backend,
            cache=self.cache,
        )

    def logits(self, token_ids: list[int], *, chunk: int | None = None) -> torch.Tensor:
        """Logits after every token, computed over quantized KV.

        `chunk` splits the prefill into pieces of that many tokens. Returns fp32 [tokens, vocab].

        Raises:
            RequestError: no tokens, ids outside the vocabulary, a context beyond the model's, or
                K or V values that are not finite.
        """
        try:
            token_ids = [operator.index(token) for token in token_ids]
        except TypeError as error:
            raise RequestError(f"token ids must be whole numbers in a list: {error}") from error
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
    path_or_name: str | Path,
    kv: str | Path | KVRecipe = "auto",
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_context: int | None = None,
    weights: str = "auto",
    block_size: int = 32,
    order: BlockOrder = BlockOrder.LAYER_MAJOR,
    backend: str = "auto",
    cache: str = "kvq",
    scales: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Model:
    """Load a model and choose its KV format.

    `path_or_name`: a Hugging Face folder, a hub name, or "tiny", the embedded model. `kv`: a
    format name, a pair, a kvq.json or a KVRecipe; "auto" is the weights' own type. `scales`: a
    kvq.json with static scales; one inside the model folder is found by itself. A static format
    without any is refused when it is first used. `cache`: the cache backend that keeps K and V,
    kvq's own, "dense", or one that an installed package brings. `weights`: "auto" is as the checkpoint
    stores them, quantized or not; a name such as "fp8", "int8" or "int4_g64" rounds every Linear layer
    to the nearest codes while it is loaded.

    Raises:
        ModelError: missing, damaged or refused model.
        ConfigError: an option that can't be used as given.
    """
    check_backend(backend)
    check_kernels_unnamed(cache, backend)
    cache_backend(cache)
    folder = resolve_model(str(path_or_name), revision=revision, token=token)
    loaded = load_weights(
        folder, device=device, dtype=dtype, max_context=max_context, weights=weights, backend=backend
    )
    recipe = resolve_recipe(loaded, kv)
    plan_layout(loaded.geometry, recipe, block_size=block_size, order=order)
    static = find_scales(loaded, scales)
    probe_layers(loaded)
    return Model(
        loaded,
        recipe,
        static_scales=static,
        block_size=block_size,
        order=order,
        backend=backend,
        cache=cache,
    )


def probe_layers(weights: LoadedWeights) -> None:
    """Probe the model, with its layers fused where they can be, and as they are if that were wrong.

    Raises:
        ModelError: see `probe`.
    """
    if weights.device.type == "cpu" and fuse_layers(weights.model):
        try:
            return probe(weights)
        except (ModelError, ConfigError):
            unfuse_layers(weights.model)
            weights.forget_rows()
    return probe(weights)


def find_scales(weights: LoadedWeights, path: str | Path | None) -> StaticScales | None:
    """Static scales from a kvq.json, or from the one inside the model folder if there is one.

    Raises:
        ConfigError: the file is unreadable, holds no static scales, or another model's.
    """
    beside = weights.folder / "kvq.json"
    if path is None and not beside.is_file():
        return None
    recipe = KVRecipe.load(path or beside)
    scales = recipe.static_scales
    if path is not None and scales is None:
        raise ConfigError(f"{path} holds no static scales; make some: `kvq calibrate MODEL --out kvq.json`")
    if path is not None and scales is not None:
        check_recipe_fits(weights.geometry, recipe)
        scales.check(model_digest=weights.digest, kv_heads=weights.geometry.kv_heads)
    return scales


def resolve_recipe(weights: LoadedWeights, kv: str | Path | KVRecipe) -> KVRecipe:
    """Return the recipe that `kv` means for a model.

    Raises:
        ConfigError: unknown format, or one that the model's head dimensions don't fit.
    """
    if isinstance(kv, KVRecipe):
        check_recipe_fits(weights.geometry, kv)
        return kv
    if not isinstance(kv, str | Path):
        raise ConfigError(f"kv must be a format name, a kvq.json or a KVRecipe, got {kv!r}")
    kv = str(kv)
    if kv.endswith(".json"):
        recipe = replace(KVRecipe.load(kv), label=kv)  # files that hold like formats are told apart
        check_recipe_fits(weights.geometry, recipe)
        return recipe
    if kv == "auto":
        kv = _UNQUANTIZED.get(next(weights.model.parameters()).dtype, "bf16")
    return KVRecipe.uniform(kv, weights.geometry.head_dims)
