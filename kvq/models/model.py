"""`kvq.load` and the model it returns."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvq.errors import ConfigError, RequestError
from kvq.formats import KVRecipe
from kvq.geometry import ModelGeometry
from kvq.layout import BlockOrder, KVLayout, plan_layout
from kvq.models.generation import Piece, SamplingOptions, stream
from kvq.models.probe import probe
from kvq.models.resolve import resolve_model
from kvq.models.session import Session
from kvq.models.weights import LoadedWeights, load_weights


class Model:
    """A model whose KV cache lies in blocks of one recipe."""

    def __init__(
        self, weights: LoadedWeights, recipe: KVRecipe, *, block_size: int, order: BlockOrder, backend: str
    ):
        self.weights = weights
        self.recipe = recipe
        self.block_size = block_size
        self.order = order
        self.backend = backend

    @property
    def geometry(self) -> ModelGeometry:
        """Layers, heads, head dimensions, windows."""
        return self.weights.geometry

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.weights.tokenizer

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

    def with_kv(self, kv: "str | KVRecipe", *, scales: "str | Path | None" = None) -> "Model":
        """The same weights with another KV recipe; nothing is loaded again.

        Raises:
            ConfigError: unknown format, one that doesn't fit, or static scales missing or foreign.
        """
        other = copy.copy(self)
        other.recipe = resolve_recipe(self.weights, kv, scales)
        return other

    def session(self, *, max_tokens: int, max_sequences: int = 1) -> Session:
        """Pools for `max_sequences` sequences of up to `max_tokens` tokens, and steps over them."""
        self.recipe.check_scales(model_digest=self._digest_if_needed(), kv_heads=self.geometry.kv_heads)
        return Session(
            self.weights,
            self.recipe,
            self.layout,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            backend=self.backend,
        )

    def logits(self, token_ids: list[int], *, chunk: int | None = None) -> torch.Tensor:
        """Logits after every token, computed over quantized KV.

        `chunk` splits the prefill into pieces of that many tokens. Returns fp32 [tokens, vocab].

        Raises:
            RequestError: no tokens, ids outside the vocabulary, a context beyond the model's, or
                K or V values that are not finite.
        """
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
            if not result.finite:
                raise RequestError(
                    "K or V held NaN or infinity; the weights or the dtype overflow, try dtype=fp32"
                )
            parts.append(result.logits)
        return torch.cat(parts)

    def stream(self, prompt: str, options: SamplingOptions | None = None) -> Iterator[Piece]:
        """Generate text from a prompt, piece by piece; never splits a character.

        Raises:
            RequestError: an empty prompt, or prompt and max_tokens beyond the model's context.
        """
        return stream(self.tokenizer, self.session, prompt, options or SamplingOptions(), self.weights)

    def _digest_if_needed(self) -> str:
        return self.weights.digest if self.recipe.static_scales is not None else ""


def load(
    path_or_name: str | Path,
    kv: str | KVRecipe = "auto",
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_context: int | None = None,
    block_size: int = 32,
    order: BlockOrder = BlockOrder.LAYER_MAJOR,
    backend: str = "auto",
    scales: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Model:
    """Load a model and choose its KV format.

    `path_or_name`: a Hugging Face folder, a hub name, or "tiny", the embedded model. `kv`: a
    format name, a pair, a kvq.json or a KVRecipe; "auto" is the weights' own type. `scales`: a
    kvq.json with static scales; one inside the model folder is found by itself.

    Raises:
        ModelError: missing, damaged or refused model.
        ConfigError: an option that can't be used as given.
    """
    from kvq.kernels import check_backend

    check_backend(backend)
    folder = resolve_model(str(path_or_name), revision=revision, token=token)
    weights = load_weights(folder, device=device, dtype=dtype, max_context=max_context)
    probe(weights)
    recipe = resolve_recipe(weights, kv, scales)
    plan_layout(weights.geometry, recipe, block_size=block_size)
    return Model(weights, recipe, block_size=block_size, order=order, backend=backend)


def resolve_recipe(weights: LoadedWeights, kv: str | KVRecipe, scales: str | Path | None) -> KVRecipe:
    """Return the recipe that `kv` means for a model, with static scales where it needs them."""
    recipe = _named_recipe(weights, kv)
    beside = weights.folder / "kvq.json"
    if scales is not None:
        if not recipe.is_static:
            raise ConfigError(
                f"{scales} was given, but {recipe.name} uses no static scales; drop one of them"
            )
        found = KVRecipe.load(scales).static_scales
        if found is None:
            raise ConfigError(
                f"{scales} holds no static scales; make some with `kvq calibrate MODEL --out kvq.json`"
            )
        recipe = recipe.with_scales(found)
    elif recipe.is_static and recipe.static_scales is None and beside.is_file():
        recipe = recipe.with_scales(KVRecipe.load(beside).static_scales)
    if recipe.static_scales is not None:
        recipe.check_scales(model_digest=weights.digest, kv_heads=weights.geometry.kv_heads)
    return recipe


def _named_recipe(weights: LoadedWeights, kv: str | KVRecipe) -> KVRecipe:
    if isinstance(kv, KVRecipe):
        return kv
    if kv.endswith(".json"):
        return KVRecipe.load(kv)
    if kv == "auto":
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        kv = names.get(next(weights.model.parameters()).dtype, "bf16")
    return KVRecipe.uniform(kv, weights.geometry.head_dims)
