"""Cache settings read from a transformers config: geometry, recipe and attention function."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvq.cache.transformers.attention import NAME, PACKED_NAME
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.geometry import FAMILIES, LayerGeometry, ModelGeometry, parse_geometry
from kvq.layout import check_recipe_fits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CacheConfig:
    """Settings from a model's live config, read when needed, as the attention can change between calls."""

    text: Any  # the decoder's own PreTrainedConfig, shared with the model's modules
    geometry: ModelGeometry  # K and V as attention sees them
    latent: ModelGeometry | None  # K and V as `update` gets them, if different
    has_other_parts: bool  # vision or audio in addition to the text decoder

    @property
    def attends_from_blocks(self) -> bool:  # D223: compiled kernels, or torch over dequantized rows
        """True if the model uses the "kvq" attention.

        Raises:
            ConfigError: the model uses the attention of kvq's sessions, or is not a text-only model.
        """
        name = self.text._attn_implementation
        if name == PACKED_NAME:
            raise ConfigError(
                f"this model was loaded by kvq.load, whose attention takes no KvqCache; load it with "
                f"transformers, or call model.set_attn_implementation({NAME!r})"
            )
        if name == NAME and self.has_other_parts:
            raise ConfigError(
                f"attn_implementation={NAME!r} runs text models only, {self.geometry.model_type} is part "
                f"of a larger one whose masks it can't see; use 'sdpa', KvqCache works with it too"
            )
        return bool(name == NAME)

    @property
    def received(self) -> ModelGeometry:
        """Geometry of the rows that `update` receives."""
        return self.geometry if self.latent is None else self.latent

    @property
    def stored(self) -> ModelGeometry:
        """Geometry of the stored rows; these are latents only if the model code itself expands latents."""
        return self.geometry if self.latent is None or self.attends_from_blocks else self.latent


def read_config(config: Any) -> CacheConfig:
    """Check a model's config, and read the settings that a cache needs.

    Raises:
        ConfigError: the config isn't from transformers, or its model is an encoder-decoder, not causal, or of
            an unsupported family.
    """
    if not hasattr(config, "get_text_config"):
        raise ConfigError(
            f"config must be a transformers config, got {type(config).__name__}; pass model.config"
        )
    text = config.get_text_config(decoder=True)
    for flag in ("is_encoder_decoder", "add_cross_attention"):
        if getattr(config, flag, False) or getattr(text, flag, False):
            raise ConfigError(
                f"{config.model_type} has {flag}=True; KvqCache holds decoder self-attention only, "
                f"use transformers' EncoderDecoderCache"
            )
    if getattr(text, "use_bidirectional_attention", False) or getattr(text, "is_causal", True) is False:
        raise ConfigError(f"{text.model_type}: its attention is not causal; its KV can't be cached")
    geometry = parse_geometry(text.to_dict()).expanded()
    return CacheConfig(
        text=text,
        geometry=geometry,
        latent=_latents(text, geometry) if FAMILIES[geometry.model_type].latent else None,
        has_other_parts=text is not config,
    )


def read_recipe(kv: str | Path | KVRecipe, scales: str | Path | None, config: CacheConfig) -> KVRecipe:
    """Return the recipe for `kv`, with the static scales that it needs.

    For latents, a format name without options quantizes each token separately, as in kvq's own sessions.

    Raises:
        ConfigError: the format is unknown, or the recipe or scales are missing or don't fit the layers.
    """
    geometry = config.stored
    recipe = KVRecipe.named(kv, geometry.head_dims, whole_blocks=config.latent is None)
    check_recipe_fits(geometry, recipe)
    if scales is not None:
        recipe = recipe.with_scales(KVRecipe.load_scales(scales).static_scales)
    recipe.require_scales()
    for calibrated in (recipe.static_scales, recipe.centers):
        if calibrated is not None:  # a config identifies a model's heads, not its weights
            calibrated.check(model_digest=calibrated.model_digest, kv_heads=geometry.kv_heads)
    return recipe


def _latents(text: Any, geometry: ModelGeometry) -> ModelGeometry:
    """Return the geometry of latents in a cache: one latent and one rotated key row for all heads."""
    layers = tuple(
        LayerGeometry(
            index=layer.index,
            kv_heads=1,
            k_head_dim=text.kv_lora_rank,
            v_head_dim=text.qk_rope_head_dim,
            window=layer.window,
        )
        for layer in geometry.layers
    )
    return replace(geometry, layers=layers)
