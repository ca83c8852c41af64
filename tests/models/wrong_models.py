"""Models on no list whose attention is not what kvq computes: Llama's, each changed in one way.

`register(name)` makes transformers know one; `WRONG` says what refuses it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from tests.helpers_models import VOCAB, build_model

PLAIN = modeling_llama.eager_attention_forward
REACH = 16  # tokens that chunks and prefixes have
Scores = Callable[[Tensor], Tensor]  # fp32 [batch, heads, queries, keys] -> the same


def eager_with(change: Scores) -> Callable[..., Any]:
    """Eager attention whose scores are changed before the causal mask."""

    def eager(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any) -> Any:
        k, v = (modeling_llama.repeat_kv(x, module.num_key_value_groups) for x in (k, v))
        weights = torch.softmax(change(q @ k.transpose(2, 3) * scaling) + mask, dim=-1)
        return (weights @ v).transpose(1, 2).contiguous(), weights

    return eager


def distances(scores: Tensor) -> Tensor:
    """[queries, keys]: how far a key lies behind its query."""
    own, key = (torch.arange(n) for n in scores.shape[2:])
    return own[:, None] - key[None, :]


def with_alibi(scores: Tensor) -> Tensor:
    return scores - 0.1 * distances(scores)


def in_chunks(scores: Tensor) -> Tensor:
    own, key = (torch.arange(n) // REACH for n in scores.shape[2:])
    return scores.masked_fill(own[:, None] != key[None, :], -1e9)


def clipped(scores: Tensor) -> Tensor:
    return scores.clamp(-0.5, 0.5)


def scaled_by_position(scores: Tensor) -> Tensor:
    return scores * torch.log(torch.arange(scores.shape[2]) + 2.0)[:, None]


def own_attention(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A Llama attention's forward that calls `attend(function, module, q, k, v, mask, keywords)`."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        **keywords: Any,
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        cache = keywords.pop("past_key_values", None)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.eager)
        out, weights = attend(function, self, q, k, v, attention_mask, keywords | {"scaling": self.scaling})
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    return forward


def plainly(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    return function(self, q, k, v, mask, **keywords)


def with_prefix(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    """The first tokens see each other, by a mask that only the model's own attention is given."""
    if mask is not None:
        mask = mask.clone()
        mask[..., :REACH, :REACH] = 0
    return function(self, q, k, v, mask, **keywords)


def with_own_mask(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    return function(self, q, k, v, q.new_zeros(1, 1, q.shape[2], k.shape[2]), **keywords)


def with_bias(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    return function(self, q, k, v, mask, attention_bias=q.new_zeros(q.shape[2], k.shape[2]), **keywords)


def across(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    """Attends to what an encoder gave, which is of another length."""
    return function(self, q, k[:, :, :5], v[:, :, :5], None, **keywords)


def without_direction(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    return function(self, q, k, v, None, is_causal=False, **keywords)


def twice(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    function(self, q, k, v, mask, **keywords)
    return function(self, q, k, v, mask, **keywords)


def without_keywords(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    return function(self, q, k, v, mask, scaling=self.scaling)


def with_state(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    """A running mean of values since the call began, as of a recurrent layer that forgets between calls."""
    count = torch.arange(1, v.shape[2] + 1)[:, None]
    return function(self, q, k, v + v.cumsum(2) / count, mask, **keywords)


def remembering(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    """What came in the call before goes into this one."""
    before, self.kept = getattr(self, "kept", 0.0), v.mean()
    return function(self, q, k, v + before, mask, **keywords)


def looking_like_a_window(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    """Chunks, of which the code says that they are a window."""
    return function(self, q, k, v, mask, **keywords | {"sliding_window": REACH})


_shared: dict[str, tuple[Tensor, Tensor]] = {}  # what the first layer's attention was called with


def sharing(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The second layer attends over the first one's K and V, after a change of V."""

    def attend(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
        if self.layer_idx == 0:
            _shared["states"] = k, v
        else:
            k, v = _shared["states"]
            v = change(v)
        return function(self, q, k, v, mask, **keywords)

    return attend


# name -> (eager attention, how it is called, what the refusal says)
WRONG: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "alibi": (eager_with(with_alibi), plainly, "its own attention differs"),
    "chunks": (eager_with(in_chunks), plainly, "its own attention differs"),
    "clipped": (eager_with(clipped), plainly, "its own attention differs"),
    "scaled": (eager_with(scaled_by_position), plainly, "its own attention differs"),
    "prefix": (PLAIN, with_prefix, "its own attention differs"),
    "mask": (PLAIN, with_own_mask, "layer 0 applies an attention mask of its own"),
    "bias": (PLAIN, with_bias, "layer 0 calls attention with attention_bias, which kvq does not take"),
    "across": (PLAIN, across, "layer 0 attends from 7 tokens to 5 new keys"),
    "both_ways": (PLAIN, without_direction, "layer 0 is not causal"),
    "twice": (PLAIN, twice, r"its 2 layers call attention for \[0, 0, 1, 1\], not once each"),
    "chunks_as_windows": (eager_with(in_chunks), looking_like_a_window, "its own attention differs"),
    "changing": (PLAIN, sharing(lambda v: v.mul_(1.5)), "its own attention differs"),
    "deaf": (PLAIN, without_keywords, "its code doesn't hand keywords on to attention"),
    "state": (PLAIN, with_state, "how it is cut and packed changes it"),
    "memory": (PLAIN, remembering, "it carries something from call to call"),
}


def in_chunks_by_number(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
) -> Any:
    """In every fourth layer, and nothing in the config says in which."""
    change = in_chunks if module.layer_idx % 4 == 3 else lambda scores: scores
    return eager_with(change)(module, q, k, v, mask, scaling)


def within_span(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any) -> Any:
    def near(scores: Tensor) -> Tensor:
        return scores.masked_fill(distances(scores) >= module.config.attention_span, -1e9)

    return eager_with(near)(module, q, k, v, mask, scaling)


def looking_far(function: Any, self: Any, q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    """Says that it has a window that its own attention doesn't have."""
    return function(self, q, k, v, mask, **keywords | {"sliding_window": 200})


# The same of what a few layers and tokens don't show; with fields of the config.
HIDDEN: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, int], str]] = {
    "fourth": (in_chunks_by_number, plainly, {"num_hidden_layers": 4}, "in a small one of more layers, over"),
    "span": (within_span, plainly, {"attention_span": 200}, "its own attention differs"),
    "far": (PLAIN, looking_far, {}, "its window of 200 tokens is none that its config names"),
}


def register(name: str, eager: Callable[..., Any], attend: Callable[..., Any]) -> type[LlamaConfig]:
    """Make transformers know `wrong_NAME`, as a package of its own would."""
    config = type(f"{name.title()}Config", (LlamaConfig,), {"model_type": f"wrong_{name}"})
    attention = type(
        f"{name.title()}Attention",
        (modeling_llama.LlamaAttention,),
        {"forward": own_attention(attend), "eager": staticmethod(eager)},
    )

    def built(self: Any, about: Any) -> None:
        LlamaForCausalLM.__init__(self, about)
        for layer in self.model.layers:
            layer.self_attn.__class__ = attention

    model = type(
        f"{name.title()}ForCausalLM", (LlamaForCausalLM,), {"config_class": config, "__init__": built}
    )
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    return config


def save_wrong(
    folder: Path, name: str, eager: Callable[..., Any], attend: Callable[..., Any], **fields: int
) -> Path:
    """A small random one; its weights are no reason to refuse it."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2} | fields
    config = register(name, eager, attend)(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=80, max_position_embeddings=256, **sizes
    )
    build_model(config).save_pretrained(folder)
    return folder
