"""How many parameters a model has, from the dict of its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvq.errors import ConfigError
from kvq.geometry import ModelGeometry

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Numbers of values, by what quantizers treat alike and by what a token reads."""

    embedding: int  # the input's; a lookup reads one row
    head: int  # the output's; 0 where the embedding serves for it
    attention: int
    mlp: int  # dense ones and shared experts
    experts: int  # routed ones, all of them
    other: int  # norms, biases, routers, sinks
    active_experts: int  # of the routed ones, what one token passes through
    outputs: int  # rows of the weights of attention and MLP, which have a scale each in some formats
    inner: int  # width of the widest MLP that a token passes through

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.head + self.linear + self.experts + self.other

    @property
    def linear(self) -> int:
        """In weights that quantizers pack; all experts of a layer are one tensor, which they leave alone."""
        return self.attention + self.mlp

    @property
    def active(self) -> int:
        """That one token multiplies with: a tied embedding is read as the head."""
        head = self.head or self.embedding
        return head + self.attention + self.mlp + self.active_experts + self.other


def count_parameters(config: Config, geometry: ModelGeometry) -> Parameters:
    """Count a text model's parameters.

    Raises:
        ConfigError: a family whose layers aren't known here.
    """
    family = geometry.model_type
    if family not in _LAYERS:
        raise ConfigError(
            f"the weights of {family} can't be counted from its config.json; give --weights, their bytes"
        )
    hidden, vocab = geometry.hidden_size, geometry.vocab_size
    tied = config.get("tie_word_embeddings", family in _TIED)
    sum_ = Parameters(
        embedding=vocab * hidden,
        head=0 if tied else vocab * hidden,
        attention=0,
        mlp=0,
        experts=0,
        other=_final(config, family, hidden, vocab),
        active_experts=0,
        outputs=0,
        inner=0,
    )
    for index in range(len(geometry.layers)):
        layer = _LAYERS[family](config, geometry, index)
        sum_ = replace(
            sum_,
            attention=sum_.attention + layer.attention,
            mlp=sum_.mlp + layer.mlp,
            experts=sum_.experts + layer.experts,
            other=sum_.other + layer.other,
            active_experts=sum_.active_experts + layer.active_experts,
            outputs=sum_.outputs + layer.outputs,
            inner=max(sum_.inner, layer.inner),
        )
    return sum_


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    attention: int
    other: int
    outputs: int
    inner: int  # of one token
    mlp: int = 0
    experts: int = 0
    active_experts: int = 0


# Families whose class ties the head to the embedding unless the config says otherwise.
_TIED = ("gemma", "gemma2", "gemma3_text", "gpt2", "cohere", "cohere2", "starcoder2")


def _final(config: Config, family: str, hidden: int, vocab: int) -> int:
    """The last norm, learned positions and the head's bias."""
    if family == "gpt2":
        return 2 * hidden + int(config.get("n_positions", 1024)) * hidden
    if family == "phi":
        return 2 * hidden + vocab
    return 2 * hidden if family == "starcoder2" else hidden


def _get(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"config.json: {name} is needed to count the weights, and is not there")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"config.json: {name} must be a number of at least 0, got {value!r}")
    return value


def _experts(config: Config, name: str, default: int) -> int:
    """How many there are, under the family's own name or the one that transformers writes since version 5."""
    return _get(config, name if name in config else "num_local_experts", default)


def _attention(config: Config, geometry: ModelGeometry, index: int) -> tuple[int, int]:
    """Weights of the four projections, and the values in their biases."""
    layer, hidden = geometry.layers[index], geometry.hidden_size
    q = geometry.q_heads * layer.k_head_dim
    k, v = layer.kv_heads * layer.k_head_dim, layer.kv_heads * layer.v_head_dim
    out = geometry.q_heads * layer.v_head_dim
    return hidden * (q + k + v + out), q + k + v


def _gated(hidden: int, inner: int) -> tuple[int, int]:
    """Weights of a gated MLP, and the rows of its three matrices."""
    return 3 * hidden * inner, 2 * inner + hidden


def _llama(config: Config, geometry: ModelGeometry, index: int) -> _Layer:
    """A gated MLP; two norms, four in Gemma 2 and 3; biases and norms of heads where the family has them."""
    family, hidden = geometry.model_type, geometry.hidden_size
    attention, biases = _attention(config, geometry, index)
    dim = geometry.layers[index].k_head_dim
    other = (4 if family in ("gemma2", "gemma3_text") else 2) * hidden
    if family == "qwen2" or (family not in ("qwen2", "glm") and config.get("attention_bias")):
        other += biases
        if family != "qwen2":
            other += hidden
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        other += 2 * dim
    if family == "olmo2":
        layer = geometry.layers[index]
        other += geometry.q_heads * dim + layer.kv_heads * dim
    inner = _get(config, "intermediate_size")
    mlp, rows = _gated(hidden, inner)
    return _Layer(attention=attention, other=other, outputs=biases + hidden + rows, inner=inner, mlp=mlp)


def _mixtral(config: Config, geometry: ModelGeometry, index: int) -> _Layer:
    """Experts in every layer."""
    base = _llama(config, geometry, index)
    return _with_experts(
        base,
        geometry.hidden_size,
        inner=_get(config, "intermediate_size", 14336),
        count=_get(config, "num_local_experts", 8),
        chosen=_get(config, "num_experts_per_tok", 2),
    )


def _qwen3_moe(config: Config, geometry: ModelGeometry, index: int) -> _Layer:
    """Experts in every `decoder_sparse_step`-th layer but those that are named dense."""
    base = _llama(config, geometry, index)
    step, count = _get(config, "decoder_sparse_step", 1), _experts(config, "num_experts", 128)
    if index in (config.get("mlp_only_layers") or ()) or not count or (index + 1) % step:
        return base
    return _with_experts(
        base,
        geometry.hidden_size,
        inner=_get(config, "moe_intermediate_size", 768),
        count=count,
        chosen=_get(config, "num_experts_per_tok", 8),
    )


def _gpt_oss(config: Config, geometry: ModelGeometry, index: int) -> _Layer:
    """Experts with biases; biases on all projections; a sink for each query head."""
    hidden, inner = geometry.hidden_size, _get(config, "intermediate_size", 2880)
    count, chosen = _get(config, "num_local_experts", 128), _get(config, "num_experts_per_tok", 4)
    attention, biases = _attention(config, geometry, index)
    expert_biases = count * (2 * inner + hidden)
    other = 2 * hidden + biases + hidden + geometry.q_heads + count * hidden + count + expert_biases
    each, _ = _gated(hidden, inner)
    return _Layer(
        attention=attention,
        other=other,
        outputs=biases + hidden,
        inner=chosen * inner,
        experts=count * each,
        active_experts=chosen * each,
    )


def _deepseek_v3(config: Config, geometry: ModelGeometry, index: int) -> _Layer:
    """Multi-head latent attention; the first layers dense, then routed experts beside a shared one.

    Source: DeepSeek-V3 Technical Report (arXiv:2412.19437), section 2.1.
    """
    hidden, heads = geometry.hidden_size, geometry.q_heads
    q_rank, kv_rank = config.get("q_lora_rank", 1536), _get(config, "kv_lora_rank", 512)
    rope, nope = _get(config, "qk_rope_head_dim", 64), _get(config, "qk_nope_head_dim", 128)
    v_dim = _get(config, "v_head_dim", 128)
    other = 2 * hidden + kv_rank
    outputs = heads * (nope + rope) + kv_rank + rope + heads * (nope + v_dim) + hidden
    if q_rank:
        attention = hidden * q_rank + q_rank * heads * (nope + rope)
        other += q_rank
        outputs += q_rank
    else:
        attention = hidden * heads * (nope + rope)
    attention += hidden * (kv_rank + rope) + kv_rank * heads * (nope + v_dim) + heads * v_dim * hidden
    if index < _get(config, "first_k_dense_replace", 3):
        inner = _get(config, "intermediate_size", 18432)
        dense, rows = _gated(hidden, inner)
        return _Layer(attention=attention, other=other, outputs=outputs + rows, inner=inner, mlp=dense)
    inner = _get(config, "moe_intermediate_size", 2048)
    each, _ = _gated(hidden, inner)
    count, chosen = _experts(config, "n_routed_experts", 256), _get(config, "num_experts_per_tok", 8)
    shared, rows = _gated(hidden, _get(config, "n_shared_experts", 1) * inner)
    return _Layer(
        attention=attention,
        other=other + count * hidden + count,  # the router, and its correction
        outputs=outputs + rows,
        inner=chosen * inner,
        mlp=shared,
        experts=count * each,
        active_experts=chosen * each,
    )


def _llama4(config: Config, geometry: ModelGeometry, index: int) -> _Layer:
    """Routed experts beside a shared one in every `interleave_moe_layer_step`-th layer, the others dense."""
    hidden, inner = geometry.hidden_size, _get(config, "intermediate_size", 8192)
    attention, biases = _attention(config, geometry, index)
    other = 2 * hidden + (biases + hidden if config.get("attention_bias") else 0)
    if (index + 1) % (_get(config, "interleave_moe_layer_step", 1) or 1):
        inner = _get(config, "intermediate_size_mlp", 16384)
        dense, rows = _gated(hidden, inner)
        return _Layer(
            attention=attention, other=other, outputs=biases + hidden + rows, inner=inner, mlp=dense
        )
    each, rows = _gated(hidden, inner)
    count, chosen = _get(config, "num_local_experts", 16), _get(config, "num_experts_per_tok", 1)
    return _Layer(
        attention=attention,
        other=other + count * hidden,  # the router
        outputs=biases + hidden + rows,
        inner=(1 + chosen) * inner,
        mlp=each,
        experts=count * each,
        active_experts=chosen * each,
    )


def _phi(config: Config, geometry: ModelGeometry, index: int) -> _Layer:
    """An MLP of two matrices, biases everywhere, one norm (Phi 1 and 2)."""
    hidden, inner = geometry.hidden_size, _get(config, "intermediate_size", 4 * geometry.hidden_size)
    attention, biases = _attention(config, geometry, index)
    other = 2 * hidden + biases + hidden + inner + hidden
    outputs = biases + hidden + inner + hidden
    return _Layer(attention=attention, other=other, outputs=outputs, inner=inner, mlp=2 * hidden * inner)


def _with_experts(base: _Layer, hidden: int, *, inner: int, count: int, chosen: int) -> _Layer:
    """The layer with routed experts in place of its MLP."""
    each, _ = _gated(hidden, inner)
    return replace(
        base,
        mlp=0,
        outputs=base.outputs - _gated(hidden, base.inner)[1],
        inner=chosen * inner,
        experts=count * each,
        active_experts=chosen * each,
        other=base.other + count * hidden,  # the router
    )


_LAYERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"), _llama),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "llama4_text": _llama4,
    "phi": _phi,
}
