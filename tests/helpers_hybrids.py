"""Small hybrid models: random, with layers that keep states beside those that attend."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import AutoConfig

from kvq.models import Model
from kvq.models.observe.tiny_copy import build_tiny_copy
from tests.engine.kit import EOS, one_character_tokenizer
from tests.helpers_models import load_eager, load_fp32, random_tokens

# What keeps the state, and what a family's configuration is to say beside its defaults.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {},  # gated delta nets, with attention that is gated
    "falcon_h1": {},  # Mamba-2 and attention in the same layers
    "lfm2": {"full_attn_idxs": [2, 5]},  # short convolutions
    "lfm3": {},  # the same, beside sliding windows
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},  # Mamba-2, experts
    "nemotron_h": {},  # Mamba-2, layers with neither
    "olmo_hybrid": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "bamba": {"attn_layer_indices": [2, 5]},
    "kimi_linear": {},  # Kimi delta attention, latent attention
    "bailing_hybrid": {},
    "minimax": {},  # lightning attention
}
QUICK = ("qwen3_next", "falcon_h1", "lfm2")
OTHERS = tuple(sorted(FAMILIES.keys() - {*QUICK}))


@cache
def hybrid_folder(family: str) -> Path:
    """A small model of a family, with a tokenizer of one character a token."""
    folder = Path(mkdtemp(prefix=f"kvq-{family}-"))
    config = AutoConfig.for_model(family, **FAMILIES[family])
    build_tiny_copy(json.loads(config.to_json_string(use_diff=False))).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"eos_token_id": EOS}))
    (folder / "generation_config.json").unlink(missing_ok=True)  # which names the large one's tokens
    one_character_tokenizer().save_pretrained(folder)
    return folder


@cache
def hybrid(family: str) -> tuple[Model, Any]:
    """It under kvq, fp32 KV in blocks of 16, and under transformers."""
    folder = hybrid_folder(family)
    return load_fp32(folder, block_size=16), load_eager(folder)


def tokens(count: int, *, seed: int) -> list[int]:
    """Random ids that every small model knows; none ends a text."""
    return [max(3, token) for token in random_tokens(count, seed=seed)]


def same(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((a - b).abs().max() / b.abs().max())
