"""The models that engines run here: shapes of real ones, random weights."""

from functools import lru_cache
from typing import Any

from benchmarks.gpu.case import Target

_SHARED = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "bfloat16",
}
SMALL: dict[str, Any] = {  # Qwen3-0.6B, but for the longest context
    **_SHARED,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}
LARGE: dict[str, Any] = {  # Llama-3.1-8B, with plain RoPE
    **_SHARED,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}
_TINY = {  # what a rehearsal makes of both
    "vocab_size": 5000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


@lru_cache(maxsize=1)
def model(target: Target, name: str, *, stored: bool = False, **changes: int) -> Any:
    """The `small` or the `large` one, made on the device; `stored`: its weights in a file too, for rivals."""
    import torch

    from kvq.bench.random_model import random_model

    config = (SMALL if name == "small" else LARGE) | changes | target.pick({}, _TINY)
    where = torch.device(target.device)
    return random_model(config, target.folder / f"model-{name}", where, backend=target.backend, stored=stored)


def free_bytes(target: Target) -> int:
    """Return the free bytes of the device's memory; in a rehearsal enough."""
    if target.is_rehearsal:
        return 1 << 30
    import torch

    torch.cuda.empty_cache()  # or what a model's loading left in torch's hands would count as taken
    return int(torch.cuda.mem_get_info()[0])


@lru_cache(maxsize=1)
def bandwidth(target: Target) -> float:
    """GB/s that a sum reads, measured once in this process."""
    import torch

    from kvq.bench.kernels import measure

    found = measure.read_bandwidth(torch.device(target.device))
    if not target.is_rehearsal:
        torch.cuda.empty_cache()
    return found
