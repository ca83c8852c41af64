"""Architectures of GGUF files that kvq reads, with transformers' names for their parts and numbers.

Source: the GGUF specification and the keys and tensor names that llama.cpp's converter writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvq.errors import ModelError, nearest

# Parts of a layer, as most families name them
_PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AROUND = {  # before and after attention, before and after the MLP
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {name: own for name, own in _NORMS_AROUND.items() if name.startswith("post")}
_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {  # {} stands for the expert's number
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_RMS_EPS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"
}  # fmt: skip
_COHERE = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
_ROUTED = {"expert_used_count": "num_experts_per_tok"}
_MOE = _ROUTED | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Names and rules of one `general.architecture`.

    `parts`: parts of a layer in transformers' model, by their name in GGUF. `keys`: fields of transformers'
    config, by the key in GGUF without the architecture's name. `biases`: fields that are True if that part
    has a bias in layer 0. `fixed`: further fields. `is_permuted`: the rows of q and k are in another order.
    `norm_shift`: what GGUF adds to norms. `is_partly_rotated`: RoPE may turn a part of each head. `pattern`:
    in a file with a window, which doesn't list the layers, every pattern-th one is full. `local_theta`: base
    of RoPE in layers with a window, if not that of the others. `layers_of_largest`: layers of the size that
    scales scores by hidden_size / heads instead of head_dim.
    """

    model_type: str
    parts: Mapping[str, str] = field(default_factory=lambda: _PARTS)
    keys: Mapping[str, str] = field(default_factory=lambda: _RMS_EPS)
    biases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_permuted: bool = False
    norm_shift: float = 0.0
    is_partly_rotated: bool = False
    pattern: int = 0
    local_theta: float | None = None
    layers_of_largest: int = 0

    @property
    def has_windows(self) -> bool:
        """True if attention may be limited to a window."""
        return self.pattern > 0 or self.model_type == "phi3"


_ATTENTION = {"attn_q": "attention_bias"}
_LLAMA_BIASES = _ATTENTION | {"ffn_up": "mlp_bias"}
ARCHITECTURES = {
    "arcee": Architecture(model_type="arcee", biases=_LLAMA_BIASES, is_permuted=True),
    "cohere2": Architecture(model_type="cohere2", keys=_COHERE, biases=_ATTENTION, pattern=4),
    "command-r": Architecture(
        model_type="cohere", parts=_PARTS | _HEAD_NORMS, keys=_COHERE, biases=_ATTENTION,
    ),
    "exaone4": Architecture(model_type="exaone4", parts=_PARTS | _HEAD_NORMS | _NORMS_AFTER, pattern=4),
    "gemma": Architecture(model_type="gemma", norm_shift=1.0),
    "gemma2": Architecture(
        model_type="gemma2", parts=_PARTS | _NORMS_AROUND, keys=_RMS_EPS | _SOFTCAPS, norm_shift=1.0,
        pattern=2, layers_of_largest=46,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", parts=_PARTS | _NORMS_AROUND | _HEAD_NORMS, keys=_RMS_EPS | _SOFTCAPS,
        norm_shift=1.0, pattern=6, local_theta=10_000.0, layers_of_largest=62,
    ),
    "glm4": Architecture(
        model_type="glm4", biases=_ATTENTION, is_partly_rotated=True,
        parts=_PARTS | _GATE_UP | {
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"
        },
    ),
    "granite": Architecture(
        model_type="granite", biases=_LLAMA_BIASES, is_permuted=True,
        keys=_RMS_EPS | {
            "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
    ),
    "llama": Architecture(model_type="llama", biases=_LLAMA_BIASES, is_permuted=True),
    "mixtral": Architecture(  # in files `llama`, with experts
        model_type="mixtral", is_permuted=True,
        keys=_RMS_EPS | _ROUTED | {"expert_count": "num_local_experts"}, fixed={"sliding_window": None},
        parts=_PARTS | {
            "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        },
    ),
    "olmo2": Architecture(model_type="olmo2", parts=_PARTS | _HEAD_NORMS | _NORMS_AFTER, biases=_ATTENTION),
    "olmo3": Architecture(  # in files `olmo2`, with windows
        model_type="olmo3", parts=_PARTS | _HEAD_NORMS | _NORMS_AFTER, biases=_ATTENTION, pattern=4
    ),
    "phi3": Architecture(
        model_type="phi3", is_partly_rotated=True,
        parts=_PARTS | _GATE_UP | {"attn_qkv": "self_attn.qkv_proj"},
    ),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen2moe": Architecture(
        model_type="qwen2_moe", parts=_PARTS | _EXPERTS | _SHARED_EXPERT,
        keys=_RMS_EPS | _MOE | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        biases={"attn_q": "qkv_bias"}, fixed={"norm_topk_prob": False},
    ),
    "qwen3": Architecture(model_type="qwen3", parts=_PARTS | _HEAD_NORMS, biases=_ATTENTION),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", parts=_PARTS | _HEAD_NORMS | _EXPERTS, keys=_RMS_EPS | _MOE,
        biases=_ATTENTION, fixed={"norm_topk_prob": True},
    ),
    "seed_oss": Architecture(
        model_type="seed_oss", biases=_LLAMA_BIASES | {"attn_output": "attention_out_bias"},
        parts=_PARTS | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "smollm3": Architecture(model_type="smollm3", biases=_LLAMA_BIASES, is_permuted=True),
}  # fmt: skip
VARIANTS = {"mixtral": "llama", "olmo3": "olmo2"}  # ours -> as files name them


def architecture_of(metadata: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture of a file's metadata; `where`: the file, for messages.

    Raises:
        ModelError: the metadata name none that kvq reads.
    """
    name = metadata.get("general.architecture")
    known = [one for one in ARCHITECTURES if one not in VARIANTS]
    if name not in known:
        hint = nearest(str(name), known) or ";"
        raise ModelError(
            f"{where}: kvq reads no GGUF of architecture {name!r:.80}{hint} it reads {', '.join(known)}; "
            f"take the model as safetensors, of which kvq reads more families (docs/models.md)"
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        return ARCHITECTURES["mixtral"]
    if name == "olmo2" and metadata.get("olmo2.attention.sliding_window"):
        return ARCHITECTURES["olmo3"]
    return ARCHITECTURES[str(name)]
