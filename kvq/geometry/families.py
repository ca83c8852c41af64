"""Model families that kvq has checked, with the defaults of their config classes, from families.json.

A config.json may omit any value that equals the class's default, so the geometry depends on these defaults. A
test compares every row with the actual class.
"""

import json
from dataclasses import dataclass
from pathlib import Path
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


def _read(of: str) -> dict[str, _Family]:
    stored = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {model_type: _Family(**defaults) for model_type, defaults in stored[of].items()}


FAMILIES = _read("families")
# Families that can be sized, but not run. Chunks, whose tokens see only each other, take as much as windows.
SIZED = _read("sized")
