"""Tiny models and runs for the tests of KvqCache."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvq.cache import register_attention
from tests.helpers_models import build_model, random_tokens, small_config

register_attention()

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "deepseek_v3"]


@lru_cache(maxsize=12)
def family_model(family: str) -> Any:
    """A tiny random model of that family."""
    return build_model(small_config(family))


def dense_attention_name(model: Any) -> str:
    """sdpa, or eager where a family has no other."""
    return "sdpa" if model._supports_sdpa else "eager"


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Ids and mask of random prompts, int64 [batch, longest]."""
    longest = max(lengths)
    ids, mask = torch.zeros(2, len(lengths), longest, dtype=torch.long)
    for i, length in enumerate(lengths):
        ids[i, longest - length :] = torch.tensor(random_tokens(length, seed=i))
        mask[i, longest - length :] = 1
    return ids, mask


def generate(model: Any, cache: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Seeded `generate` of 20 tokens unless told otherwise, no early end."""
    torch.manual_seed(3)
    options = {"max_new_tokens": 20, "do_sample": False} | options
    options["min_new_tokens"] = options["max_new_tokens"]
    with quiet():
        return model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)


@contextmanager
def quiet() -> Iterator[None]:
    """No advice from transformers on the terminal."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[Any]:
    """The model under another attention, for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)
