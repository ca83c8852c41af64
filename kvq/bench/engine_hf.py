"""What transformers' ways to serve a load have in common: the model as transformers runs it, quietly."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvq.models import Model

_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def load_rival(model: Model) -> Any:
    """The same checkpoint as transformers runs it, in the same type, never ending before its length."""
    from transformers import AutoModelForCausalLM

    with quiet():
        rival = AutoModelForCausalLM.from_pretrained(
            model.prepared.folder,
            dtype=next(model.weights.model.parameters()).dtype,
            attn_implementation="sdpa",
            local_files_only=True,
        )
    rival.generation_config.eos_token_id = None
    return rival.to(model.weights.device).eval()


def own_format(rival: Any) -> str:
    """What transformers' KV caches hold: the type of the weights."""
    return _FORMATS[rival.dtype]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep loading bars, and warnings about packages that only sizing would use, off the terminal."""
    from transformers.utils import logging as hf_logging

    loggers = [logging.getLogger(name) for name in ("transformers", "ContinuousBatchingLogger")]
    levels = [logger.level for logger in loggers]
    had_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            hf_logging.enable_progress_bar()
