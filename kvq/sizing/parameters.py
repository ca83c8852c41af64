"""Parameter counts of a model, computed from the dict of its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvq.errors import ConfigError
from kvq.geometry import ModelGeometry

Config = Mapping[str, Any]
Matrix = tuple[str, int, int]  # a Linear layer's name, weights and output rows; equal experts count as one


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Parameter counts, grouped by how quantizers treat the parameters and by which ones a token reads."""

    embedding: int = 0  # of the input; a lookup reads one row
    tables: int = 0  # further embeddings, of which a token reads one row, such as Gemma 3n's per-layer ones
    head: int = 0  # of the output; 0 if the embedding serves as the head
    attention: int = 0
    mlp: int = 0  # dense MLPs and shared experts
    experts: int = 0  # all routed experts
    other: int = 0  # norms, biases, routers, sinks
    active_experts: int = 0  # the part of the routed experts that one token passes through
    outputs: int = 0  # output rows of attention and MLP weights; in some formats, each has a scale
    expert_outputs: int = 0  # output rows of routed experts
    inner: int = 0  # width of the widest MLP that a token passes through
    matrices: tuple[Matrix, ...] = field(default=(), compare=False, repr=False)  # if known

    def __add__(self, more: "Parameters") -> "Parameters":
        """Return the sum of two counts."""
        sums = {one.name: getattr(self, one.name) + getattr(more, one.name) for one in fields(self)}
        return Parameters(**sums | {"inner": max(self.inner, more.inner)})

    @property
    def total(self) -> int:
        """Total number of parameters."""
        return self.embedding + self.tables + self.head + self.linear + self.experts + self.other

    @property
    def linear(self) -> int:
        """Number of weights in Linear layers, without experts, which are stacked in one tensor per layer."""
        return self.attention + self.mlp

    @property
    def each(self) -> tuple[Matrix, ...]:
        """Matrices of attention, MLPs and experts; if unknown, each of these counts as one matrix."""
        experts = ("layers.0.experts.0", self.experts, self.expert_outputs)
        return self.matrices or (("layers.0.linear", self.linear, self.outputs), experts)

    @property
    def active(self) -> int:
        """Number of parameters by which one token is multiplied; a tied embedding counts as the head."""
        head = self.head or self.embedding
        return head + self.attention + self.mlp + self.active_experts + self.other


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Model properties that determine memory use, from the config.json or the model's code."""

    config: Config
    geometry: ModelGeometry
    parameters: Parameters | None  # None: not counted
    refused: str | None = None  # why kvq's engine does not run it


def is_counted(family: str) -> bool:
    """Return True if the parameters of this family can be counted from a config.json."""
    return family in _LAYERS


def count_parameters(config: Config, geometry: ModelGeometry) -> Parameters:
    """Count a text model's parameters.

    Raises:
        ConfigError: kvq can't count the layers of the model's family.
    """
    family = geometry.model_type
    if not is_counted(family):
        raise ConfigError(
            f"the weights of {family} can't be counted from its config.json; give --weights, their bytes"
        )
    hidden, vocab = geometry.hidden_size, geometry.vocab_size
    tied = config.get("tie_word_embeddings", family in _TIED)
    final = 2 * hidden + vocab if family == "phi" else hidden  # the last norm; the head's bias
    whole = Parameters(embedding=vocab * hidden, head=0 if tied else vocab * hidden, other=final)
    for index in range(len(geometry.layers)):
        whole += _LAYERS[family](config, geometry, index)
    return whole


# Families whose class ties the head to the embedding unless the config says otherwise.
_TIED = ("gemma", "gemma2", "gemma3_text")


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
    """Return the number of experts, from the family's own key or from the key used since transformers 5."""
    return _get(config, name if name in config else "num_local_experts", default)


def _matrices(kind: str, place: str, shapes: Mapping[str, tuple[int, int]], copies: int = 1) -> Parameters:
    """Count the weights of part of a layer `copies` times; `shapes`: (outputs, inputs) keyed by name."""
    rows = "expert_outputs" if kind == "experts" else "outputs"
    found = tuple(
        (f"model.layers.{place}.{name}", copies * out * inputs, copies * out)
        for name, (out, inputs) in shapes.items()
    )
    sums = {kind: sum(count for _, count, _ in found), rows: sum(out for *_, out in found)}
    return Parameters(matrices=found, **sums)


def _attention(geometry: ModelGeometry, index: int) -> Parameters:
    """Count four projections, without biases; Phi 3 fuses three of them."""
    layer, hidden, family = geometry.layers[index], geometry.hidden_size, geometry.model_type
    q, k = geometry.q_heads * layer.k_head_dim, layer.kv_heads * layer.k_head_dim
    v, out = layer.kv_heads * layer.v_head_dim, geometry.q_heads * layer.v_head_dim
    shapes = {"q_proj": (q, hidden), "k_proj": (k, hidden), "v_proj": (v, hidden)}
    if family == "phi3":
        shapes = {"qkv_proj": (q + k + v, hidden)}
    shapes["dense" if family == "phi" else "o_proj"] = (hidden, out)
    return _matrices("attention", f"{index}.self_attn", shapes)


def _gated(place: str, hidden: int, inner: int, *, fused: bool = False) -> Parameters:
    """Count an MLP of three matrices, two of which may be fused."""
    first = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
    shapes = {name: (out, hidden) for name, out in first.items()} | {"down_proj": (hidden, inner)}
    return _matrices("mlp", place, shapes) + Parameters(inner=inner)


def _routed(place: str, hidden: int, inner: int, *, count: int, chosen: int) -> Parameters:
    """Count `count` experts of three matrices, and the router that chooses `chosen` for each token."""
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return _matrices("experts", f"{place}.experts.0", shapes, count) + Parameters(
        active_experts=chosen * 3 * hidden * inner, other=count * hidden, inner=chosen * inner
    )


def _llama_attention(config: Config, geometry: ModelGeometry, index: int) -> Parameters:
    """Count attention with its norms and, if the family has them, biases and head norms."""
    family, hidden = geometry.model_type, geometry.hidden_size
    attention = _attention(geometry, index)
    other = (4 if family in ("gemma2", "gemma3_text") else 2) * hidden
    if family == "qwen2":
        other += attention.outputs - hidden  # the output projection has none
    elif config.get("attention_bias"):
        other += attention.outputs
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        other += 2 * geometry.layers[index].k_head_dim
    return attention + Parameters(other=other)


def _llama(config: Config, geometry: ModelGeometry, index: int) -> Parameters:
    """Count attention and a gated MLP."""
    hidden, inner = geometry.hidden_size, _get(config, "intermediate_size")
    mlp = _gated(f"{index}.mlp", hidden, inner, fused=geometry.model_type == "phi3")
    return _llama_attention(config, geometry, index) + mlp


def _mixtral(config: Config, geometry: ModelGeometry, index: int) -> Parameters:
    """Count attention and experts."""
    hidden, inner = geometry.hidden_size, _get(config, "intermediate_size", 14336)
    count, chosen = _get(config, "num_local_experts", 8), _get(config, "num_experts_per_tok", 2)
    attention = _llama_attention(config, geometry, index)
    return attention + _routed(f"{index}.mlp", hidden, inner, count=count, chosen=chosen)


def _qwen3_moe(config: Config, geometry: ModelGeometry, index: int) -> Parameters:
    """Count a layer, with experts if `decoder_sparse_step` selects it and it isn't listed as dense."""
    step, count = _get(config, "decoder_sparse_step", 1), _experts(config, "num_experts", 128)
    if index in (config.get("mlp_only_layers") or ()) or not count or (index + 1) % step:
        return _llama(config, geometry, index)
    hidden, inner = geometry.hidden_size, _get(config, "moe_intermediate_size", 768)
    attention, chosen = _llama_attention(config, geometry, index), _get(config, "num_experts_per_tok", 8)
    return attention + _routed(f"{index}.mlp", hidden, inner, count=count, chosen=chosen)


def _gpt_oss(config: Config, geometry: ModelGeometry, index: int) -> Parameters:
    """Count experts and router with biases, projections with biases, and one sink per query head."""
    hidden, inner = geometry.hidden_size, _get(config, "intermediate_size", 2880)
    count, chosen = _get(config, "num_local_experts", 128), _get(config, "num_experts_per_tok", 4)
    attention = _attention(geometry, index)
    biases = attention.outputs + count + count * (2 * inner + hidden)
    other = Parameters(other=2 * hidden + biases + geometry.q_heads)
    return attention + other + _routed(f"{index}.mlp", hidden, inner, count=count, chosen=chosen)


def _deepseek_v3(config: Config, geometry: ModelGeometry, index: int) -> Parameters:
    """Count multi-head latent attention, and an MLP in the first layers or routed experts with a shared one.

    Source: DeepSeek-V3 Technical Report (arXiv:2412.19437), section 2.1.
    """
    hidden, heads = geometry.hidden_size, geometry.q_heads
    q_rank, kv_rank = config.get("q_lora_rank", 1536) or 0, _get(config, "kv_lora_rank", 512)
    rope, nope = _get(config, "qk_rope_head_dim", 64), _get(config, "qk_nope_head_dim", 128)
    q_dim, kv_dim = nope + rope, nope + _get(config, "v_head_dim", 128)
    width = heads * q_dim
    shapes = (
        {"q_a_proj": (q_rank, hidden), "q_b_proj": (width, q_rank)} if q_rank else {"q_proj": (width, hidden)}
    )
    shapes |= {
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * kv_dim, kv_rank),
        "o_proj": (hidden, heads * (kv_dim - nope)),
    }
    norms = Parameters(other=2 * hidden + kv_rank + q_rank)
    attention = _matrices("attention", f"{index}.self_attn", shapes) + norms
    if index < _get(config, "first_k_dense_replace", 3):
        return attention + _gated(f"{index}.mlp", hidden, _get(config, "intermediate_size", 18432))
    inner = _get(config, "moe_intermediate_size", 2048)
    count, chosen = _experts(config, "n_routed_experts", 256), _get(config, "num_experts_per_tok", 8)
    shared = _gated(f"{index}.mlp.shared_experts", hidden, _get(config, "n_shared_experts", 1) * inner)
    routed = _routed(f"{index}.mlp", hidden, inner, count=count, chosen=chosen)
    return attention + shared + routed + Parameters(other=count)  # with the router's correction


def _llama4(config: Config, geometry: ModelGeometry, index: int) -> Parameters:
    """Count routed and shared experts in every `interleave_moe_layer_step`-th layer, otherwise one MLP."""
    hidden, inner = geometry.hidden_size, _get(config, "intermediate_size", 8192)
    attention, place = _llama_attention(config, geometry, index), f"{index}.feed_forward"
    if (index + 1) % (_get(config, "interleave_moe_layer_step", 1) or 1):
        return attention + _gated(place, hidden, _get(config, "intermediate_size_mlp", 16384))
    count, chosen = _get(config, "num_local_experts", 16), _get(config, "num_experts_per_tok", 1)
    together = Parameters(inner=(1 + chosen) * inner)  # a token passes through the shared expert, too
    shared = _gated(f"{place}.shared_expert", hidden, inner)
    return attention + shared + _routed(place, hidden, inner, count=count, chosen=chosen) + together


def _phi(config: Config, geometry: ModelGeometry, index: int) -> Parameters:
    """Count an MLP of two matrices, one norm, and biases everywhere (Phi 1 and 2)."""
    hidden, inner = geometry.hidden_size, _get(config, "intermediate_size", 4 * geometry.hidden_size)
    attention = _attention(geometry, index)
    biases = attention.outputs + inner + hidden
    mlp = _matrices("mlp", f"{index}.mlp", {"fc1": (inner, hidden), "fc2": (hidden, inner)})
    return attention + mlp + Parameters(other=2 * hidden + biases, inner=inner)


_LAYERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"), _llama),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "llama4_text": _llama4,
    "phi": _phi,
}
