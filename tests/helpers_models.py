"""Tiny random models of every family, and their reference: transformers' own eager attention.

The weights are drawn large enough that attention is far from uniform, and every bias, norm weight
and sink logit is random too, so that nothing a family does can be left out unnoticed.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvq.models import Model, load
from kvq.models.describe.resolve import EMBEDDED

VOCAB = 199
WINDOW = 16
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_MOSTLY_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]

# What each family changes or adds, so that its own features have an effect at this size.
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"sliding_window": WINDOW, "layer_types": _MOSTLY_SLIDING, "logit_scale": 0.5},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
        },
    },
    "exaone4": {"sliding_window": WINDOW, "layer_types": _MOSTLY_SLIDING},
    "gemma": {"head_dim": 24},
    "gemma2": {
        "head_dim": 24, "sliding_window": WINDOW, "layer_types": _ALTERNATING,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 10,
    },
    "gemma3_text": {
        "head_dim": 24, "sliding_window": WINDOW, "layer_types": _MOSTLY_SLIDING,
        "query_pre_attn_scalar": 4,
    },
    "glm": {"head_dim": 24},
    "glm4": {"head_dim": 24},
    "gpt2": {
        "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
        "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt_neox": {"num_key_value_heads": None},
    "gpt_oss": {
        "head_dim": 24, "sliding_window": WINDOW, "layer_types": _ALTERNATING,
        "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
            "original_max_position_embeddings": 32,
        },
    },
    "granite": {
        "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "llama": {},
    "ministral": {"sliding_window": WINDOW, "layer_types": _MOSTLY_SLIDING, "head_dim": 24},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": {"clip_qkv": 4.0},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": _MOSTLY_SLIDING},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {
        "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {
        "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 24,
        "attention_bias": True,
    },
    "qwen3_moe": {
        "sliding_window": WINDOW, "use_sliding_window": True, "head_dim": 24, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "seed_oss": {"head_dim": 24, "attention_bias": True, "attention_out_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3},
    "starcoder2": {"sliding_window": WINDOW, "use_bias": True},
}  # fmt: skip
WINDOWED = sorted(name for name, options in FAMILY_OPTIONS.items() if "sliding_window" in options)


def small_config(model_type: str, **changes: Any) -> Any:
    """A transformers config of that family at test size."""
    options = {} if model_type == "gpt2" else dict(_COMMON)
    options |= FAMILY_OPTIONS[model_type] | changes
    if "layer_types" in options:
        options["num_hidden_layers"] = len(options["layer_types"])
    return AutoConfig.for_model(model_type, **options)


@torch.no_grad()
def build_model(config: Any, *, seed: int = 0) -> Any:
    """A model of that config: random weights in fp32, vectors (biases, norms, sinks) random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            spread = 1.0 if name.endswith("sinks") else 0.2
            parameter.add_(torch.randn_like(parameter) * spread)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def save_model(folder: Path, model_type: str, *, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny random model of that family; return its folder."""
    build_model(small_config(model_type, **changes), seed=seed).save_pretrained(folder)
    return folder


def load_eager(folder: Path, **changes: Any) -> Any:
    """The same weights under transformers' own eager attention in fp32; `changes` go to its config."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, **changes
    ).eval()


def load_fp32(folder: Path, **options: Any) -> Model:
    """The folder loaded by kvq with unquantized KV on the CPU."""
    return load(folder, kv="fp32", device="cpu", **options)


def assert_same_logits(ids: list[int], one: Path, other: Path) -> None:
    """Fail unless two models in fp32 have the same logits but for rounding."""
    wanted = load_fp32(one).logits(ids)
    torch.testing.assert_close(load_fp32(other).logits(ids), wanted, rtol=1e-5, atol=1e-5)


def random_tokens(count: int, *, seed: int, vocab: int = VOCAB) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()


@torch.inference_mode()
def eager_logits(reference: Any, ids: list[int]) -> Tensor:
    """Logits after every token of one forward pass without a cache: fp32 [tokens, vocab]."""
    return reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@torch.inference_mode()
def eager_greedy(reference: Any, prompt: list[int], new_tokens: int) -> tuple[Tensor, list[int]]:
    """Prefill and greedy decoding over transformers' own cache.

    Returns the logits of the prompt's tokens and of every decoded one, fp32
    [len(prompt) + new_tokens, vocab], and the tokens chosen, one more than were decoded.
    """
    output = reference(input_ids=torch.tensor([prompt]), use_cache=True)
    parts, tokens = [output.logits[0]], [int(output.logits[0, -1].argmax())]
    for _ in range(new_tokens):
        output = reference(
            input_ids=torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
        )
        parts.append(output.logits[0])
        tokens.append(int(output.logits[0, -1].argmax()))
    return torch.cat(parts), tokens


class Decoded:
    """One sequence of a session, decoded greedily as steps come: its tokens and all its logits."""

    def __init__(self, session: Any, prompt: list[int], *, chunks: Iterable[int] = ()) -> None:
        """`chunks` are the lengths of the prefill's first pieces; one more takes what is left."""
        self.sequence = session.new_sequence()
        self.prompt = prompt
        self.tokens: list[int] = []
        self._parts: list[Tensor] = []
        self._pending: list[list[int]] = []
        at = 0
        for size in chunks:
            self._pending.append(prompt[at : at + size])
            at += size
        self._pending.append(prompt[at:])

    @property
    def logits(self) -> Tensor:
        """fp32 [tokens so far, vocab]."""
        return torch.cat(self._parts)

    @property
    def fed(self) -> list[int]:
        """All token ids that went through the model."""
        count = sum(len(part) for part in self._parts)
        return [*self.prompt, *self.tokens][:count]

    def next_ids(self) -> list[int]:
        """What the next step appends."""
        return self._pending[0] if self._pending else self.tokens[-1:]

    def take(self, logits: Tensor) -> None:
        """Receive the logits of `next_ids`."""
        self._parts.append(logits)
        if self._pending:
            self._pending.pop(0)
        if not self._pending:
            self.tokens.append(int(logits[-1].argmax()))


def run_step(session: Any, rows: list[Decoded]) -> None:
    """One packed step over all rows, in their order."""
    results = session.forward([(row.sequence, row.next_ids()) for row in rows], all_rows=True)
    for row, result in zip(rows, results, strict=True):
        assert result.finite, "K or V was not finite"
        row.take(result.logits)


@contextmanager
def changed_embedding(model: Model, change: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Let a loaded model's embedding give `change(ids, rows)`; hooks would unfuse layers."""
    embedding = model.weights.model.get_input_embeddings()
    own = embedding.forward
    embedding.forward = lambda ids: change(ids, own(ids))
    try:
        yield
    finally:
        del embedding.forward


def mean_kl(a: Tensor, b: Tensor) -> float:
    """Mean over tokens of KL(softmax(a) || softmax(b)), in nats; logits [tokens, vocab]."""
    p, q = a.double().log_softmax(dim=-1), b.double().log_softmax(dim=-1)
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


def save_first_layers(folder: Path, count: int) -> None:
    """Write a folder with the embedded model's first layers: fast, and its last layer fits no longer."""
    shutil.copytree(EMBEDDED["tiny"], folder, ignore=shutil.ignore_patterns("kvq.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    weights = load_file(folder / "model.safetensors")
    dropped = tuple(f"model.layers.{i}." for i in range(count, config["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(dropped)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
