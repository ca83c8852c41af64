"""Geometry from a live transformers config: the second opinion beside `kvq.geometry`."""

from typing import Any

from kvq.geometry import FAMILIES, Expansion, LayerGeometry, ModelGeometry


def live_geometry(config: Any) -> ModelGeometry:
    """Return the geometry of an instantiated transformers config, its class defaults applied."""
    family = FAMILIES[config.model_type]
    heads = config.num_attention_heads
    latent = {}
    if family.latent:
        dims, kv_heads = (config.qk_rope_head_dim, config.kv_lora_rank), 1
        expansion = Expansion(k_dim=config.qk_nope_head_dim, v_dim=config.v_head_dim)
        latent = {"is_latent": True, "expansion": expansion}
    else:
        given = None if family.head_dim_is_fixed else getattr(config, "head_dim", None)
        dim = given or config.hidden_size // heads
        dims = (dim, dim)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    softcap = getattr(config, "attn_logit_softcapping", None)
    return ModelGeometry(
        model_type=config.model_type,
        layers=tuple(
            LayerGeometry(
                index=i, kv_heads=kv_heads, k_head_dim=dims[0], v_head_dim=dims[1], window=w, **latent
            )
            for i, w in enumerate(_windows(config, family.ignores_layer_types))
        ),
        q_heads=heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        softcap=float(softcap) if softcap else None,
        has_sinks=family.has_sinks,
    )


def _windows(config: Any, ignores_layer_types: bool) -> list[int | None]:
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if ignores_layer_types:
        return [window] * config.num_hidden_layers
    if kinds is None:
        return [None] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
