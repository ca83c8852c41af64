"""Model geometry from the dict of a config.json, without transformers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvq.errors import ConfigError, nearest
from kvq.geometry.families import FAMILIES, SIZED
from kvq.geometry.geometry import Expansion, LayerGeometry, ModelGeometry

_KINDS = {"full_attention": False, "sliding_attention": True}
_CHUNKED = {"full_attention": False, "chunked_attention": True}  # D205: chunks are windows with a flag
CHUNK_KEY = "attention_chunk_size"  # the name in configs for the length of chunks
WINDOW_KEYS = ("sliding_window", "layer_types", "use_sliding_window", CHUNK_KEY)  # which layers have one
_MAX_LAYERS = 10_000
_FULL_LAYERS = 28  # by default, below the sliding layers of families whose upper layers slide
_MAX_WINDOW = (1 << 31) - 1  # tokens, in kernels
MAX_CONTEXT = 1 << 30  # tokens; positions in kernels have 32 bits
_GPT2_NAMES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
}


def parse_geometry(config: Mapping[str, Any]) -> ModelGeometry:
    """Return the geometry described by the dict of a Hugging Face config.json.

    Raises:
        ConfigError: kvq has not checked the family, a layer's kind is unknown, or numbers are inconsistent.
    """
    reader = _Reader(config)
    family, heads = reader.family, reader.count("num_attention_heads", reader.family.q_heads)
    num_layers = reader.count("num_hidden_layers", family.num_layers)
    if num_layers > _MAX_LAYERS:
        raise ConfigError(f"config.json: {num_layers} layers are more than the {_MAX_LAYERS} kvq allows")
    hidden = reader.count("hidden_size", family.hidden_size)
    stored = reader.latents() if family.latent else reader.heads(hidden, heads)
    layers = tuple(
        replace(
            stored,
            index=i,
            number=i,
            window=window,
            is_chunked=window is not None and family.window_key == CHUNK_KEY,
        )
        for i, window in enumerate(reader.windows(num_layers))
    )
    softcap = config.get("attn_logit_softcapping", family.softcap)
    if softcap is not None and (not isinstance(softcap, int | float) or softcap < 0):
        raise ConfigError(f"config.json: attn_logit_softcapping must be a positive number, got {softcap!r}")
    return ModelGeometry(
        model_type=reader.model_type,
        layers=layers,
        q_heads=heads,
        hidden_size=hidden,
        vocab_size=reader.count("vocab_size", family.vocab_size),
        max_context=reader.count("max_position_embeddings", family.max_context, most=MAX_CONTEXT),
        softcap=float(softcap) if softcap else None,
        has_sinks=family.has_sinks,
    )


def field_name(model_type: str, name: str) -> str:
    """Return the name of a field in the config.json of a model family."""
    return _GPT2_NAMES.get(name, name) if model_type == "gpt2" else name


class _Reader:
    """Reader of a config, with the defaults of its family."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.model_type = str(config.get("model_type", ""))
        known = FAMILIES | SIZED
        if self.model_type not in known:
            raise ConfigError(
                f"model_type {self.model_type!r} is not a family kvq has checked"
                f"{nearest(self.model_type, FAMILIES) or ';'} it knows {', '.join(FAMILIES)}"
            )
        self.family = known[self.model_type]

    def count(self, key: str, default: int, *, most: int | None = None) -> int:
        """Return a positive integer from the config, or `default` if it is missing."""
        name = field_name(self.model_type, key)
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.json: {name} must be a positive number, got {value!r}")
        if most is not None and value > most:
            raise ConfigError(f"config.json: {name} may be up to {most}, got {value!r:.100}")
        return value

    def heads(self, hidden: int, q_heads: int) -> LayerGeometry:
        """Return a layer that stores K and V for each KV head."""
        derived = self.family.head_dim or hidden // q_heads
        dim = derived if self.family.head_dim_is_fixed else self.count("head_dim", derived)
        default = None if "num_key_value_heads" in self.config else self.family.kv_heads  # null: q_heads
        kv_heads = self.count("num_key_value_heads", default or q_heads)
        return LayerGeometry(index=0, kv_heads=kv_heads, k_head_dim=dim, v_head_dim=dim)

    def latents(self) -> LayerGeometry:
        """Return a layer that stores a latent vector, shared by all heads, and the rotary part of keys."""
        k_dim, v_dim = self.count("qk_nope_head_dim", 128), self.count("v_head_dim", 128)
        return LayerGeometry(
            index=0,
            kv_heads=1,
            k_head_dim=self.count("qk_rope_head_dim", 64),
            v_head_dim=self.count("kv_lora_rank", 512),
            is_latent=True,
            expansion=Expansion(k_dim=k_dim, v_dim=v_dim),
        )

    def windows(self, num_layers: int) -> list[int | None]:
        """Return the window of every layer, or None for layers with full attention."""
        if self.family.window_rule == "never":
            return [None] * num_layers
        window = self._window()
        kinds = self.config.get("layer_types")
        if kinds is not None and not self.family.ignores_layer_types:
            if not isinstance(kinds, list) or len(kinds) != num_layers:
                raise ConfigError(f"config.json: layer_types must list {num_layers} layers, got {kinds!r}")
            known = _KINDS if self.family.window_key == "sliding_window" else _CHUNKED
            for kind in kinds:
                if not isinstance(kind, str) or kind not in known:
                    raise ConfigError(
                        f"config.json: layer kind {kind!r} is not one kvq can run; it runs {', '.join(known)}"
                    )
            return [window if known[kind] else None for kind in kinds]
        return [window if self._slides(i) else None for i in range(num_layers)]

    def _window(self) -> int | None:
        if self.family.window_rule in ("upper", "optional") and not self.config.get("use_sliding_window"):
            return None
        key = self.family.window_key
        if not self.config.get(key, self.family.window):
            return None
        return self.count(key, self.family.window or 0, most=_MAX_WINDOW)

    def _slides(self, layer: int) -> bool:
        rule = self.family.window_rule
        if rule in ("pattern", "fixed"):
            given = rule == "pattern" and self.config.get("sliding_window_pattern")
            pattern = self.count("sliding_window_pattern", 0) if given else self.family.pattern
            return (layer + 1) % pattern != 0
        if rule == "upper":
            key = "max_window_layers"  # 0 is legal: all layers slide
            return layer >= (self.config.get(key) != 0 and self.count(key, _FULL_LAYERS))
        return rule in ("uniform", "optional")
