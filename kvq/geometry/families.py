"""Model families that kvq has checked, with the defaults of their config classes.

A config.json may omit any value that equals the class's default, so the geometry depends on these defaults. A
test compares every row with the actual class.
"""

from dataclasses import dataclass
from typing import Literal

# How a family without `layer_types` in its config decides which layers slide.
#   never:     none does, whatever its config names: its code in transformers has no windows
#   none:      none does, unless `layer_types` says so
#   uniform:   all do when `sliding_window` is set
#   pattern:   layer i is full when (i + 1) % sliding_window_pattern == 0
#   fixed:     the same with the family's own pattern, as its config has no such field
#   upper:     with use_sliding_window, layers from max_window_layers on
#   optional:  with use_sliding_window, all layers
WindowRule = Literal["never", "none", "uniform", "pattern", "fixed", "upper", "optional"]  # D189


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Defaults for one `model_type`; fields not given are Llama's. `None`: derived from other fields."""

    num_layers: int = 32
    q_heads: int = 32
    hidden_size: int = 4096
    vocab_size: int = 32000
    max_context: int = 2048  # tokens
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / q_heads
    head_dim_is_fixed: bool = False  # the config's head_dim is ignored by the model code
    window: int | None = None  # tokens a sliding layer sees, the query's own included
    window_rule: WindowRule = "never"
    pattern: int = 0
    window_key: str = "sliding_window"  # the config's name for `window`
    ignores_layer_types: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    latent: bool = False  # multi-head latent attention: K and V dimensions differ


FAMILIES: dict[str, _Family] = {
    "arcee": _Family(hidden_size=2560, max_context=4096),
    "cohere": _Family(num_layers=40, q_heads=64, hidden_size=8192, vocab_size=256000, max_context=8192),
    "cohere2": _Family(
        num_layers=40, q_heads=64, hidden_size=8192, vocab_size=256000, max_context=8192, window=4096,
        window_rule="pattern", pattern=4,
    ),
    "deepseek_v3": _Family(
        num_layers=61, q_heads=128, hidden_size=7168, vocab_size=129280, max_context=4096, latent=True,
    ),
    "exaone4": _Family(vocab_size=102400, window=4096, window_rule="pattern", pattern=4),
    "gemma": _Family(
        num_layers=28, q_heads=16, hidden_size=3072, vocab_size=256000, max_context=8192, kv_heads=16,
        head_dim=256,
    ),
    "gemma2": _Family(
        num_layers=26, q_heads=8, hidden_size=2304, vocab_size=256000, max_context=8192, kv_heads=4,
        head_dim=256, window=4096, window_rule="fixed", pattern=2, softcap=50.0,
    ),
    "gemma3_text": _Family(
        num_layers=26, q_heads=8, hidden_size=2304, vocab_size=262208, max_context=131072, kv_heads=4,
        head_dim=256, window=4096, window_rule="pattern", pattern=6,
    ),
    "glm": _Family(num_layers=40, vocab_size=151552, max_context=131072, kv_heads=2, head_dim=128),
    "glm4": _Family(num_layers=40, vocab_size=151552, max_context=131072, kv_heads=2, head_dim=128),
    "gpt2": _Family(num_layers=12, q_heads=12, hidden_size=768, vocab_size=50257, max_context=1024),
    "gpt_neox": _Family(num_layers=44, q_heads=64, hidden_size=6144, vocab_size=50432),
    "gpt_oss": _Family(
        num_layers=36, q_heads=64, hidden_size=2880, vocab_size=201088, max_context=131072, kv_heads=8,
        head_dim=64, window=128, window_rule="fixed", pattern=2, has_sinks=True,
    ),
    "granite": _Family(),
    "llama": _Family(),
    "ministral": _Family(max_context=131072, kv_heads=8, window=4096, window_rule="uniform"),
    "mistral": _Family(
        max_context=131072, kv_heads=8, window=4096, window_rule="uniform", ignores_layer_types=True,
    ),
    "mixtral": _Family(max_context=131072, kv_heads=8, window_rule="uniform", ignores_layer_types=True),
    "olmo": _Family(vocab_size=50304),
    "olmo2": _Family(vocab_size=50304),
    "olmo3": _Family(vocab_size=50304, window=4096, window_rule="fixed", pattern=4),
    "phi": _Family(num_layers=24, hidden_size=2048, vocab_size=51200, head_dim_is_fixed=True),
    "phi3": _Family(
        hidden_size=3072, vocab_size=32064, max_context=4096, window_rule="uniform", ignores_layer_types=True,
    ),
    "qwen2": _Family(vocab_size=151936, max_context=32768, kv_heads=32, window=4096, window_rule="upper"),
    "qwen3": _Family(
        vocab_size=151936, max_context=32768, kv_heads=32, head_dim=128, window=4096, window_rule="upper",
    ),
    "qwen3_moe": _Family(
        num_layers=24, hidden_size=2048, vocab_size=151936, max_context=32768, kv_heads=4, window=4096,
        window_rule="optional", ignores_layer_types=True,
    ),
    "seed_oss": _Family(
        num_layers=64, q_heads=80, vocab_size=155136, max_context=524288, kv_heads=8, head_dim=128,
    ),
    "smollm3": _Family(
        num_layers=36, q_heads=16, hidden_size=2048, vocab_size=128256, max_context=32768, kv_heads=4,
        window_rule="none",
    ),
    "starcoder2": _Family(
        num_layers=30, q_heads=24, hidden_size=3072, vocab_size=49152, max_context=4096, kv_heads=2,
        window_rule="uniform", ignores_layer_types=True,
    ),
}  # fmt: skip

# Families that can be sized, but not run. Chunks, whose tokens see only each other, take as much as windows.
SIZED: dict[str, _Family] = {
    "llama4_text": _Family(
        num_layers=48, q_heads=40, hidden_size=5120, vocab_size=202048, max_context=131072, kv_heads=8,
        head_dim=128, window=8192, window_rule="pattern", pattern=4, window_key="attention_chunk_size",
    ),
}  # fmt: skip
