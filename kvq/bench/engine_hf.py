"""What transformers' ways to serve a load have in common: the model as transformers runs it, quietly."""

import logging
from contextlib import AbstractContextManager
from typing import Any

from kvq.models import Model
from kvq.models.device import DTYPE_NAMES
from kvq.models.modules import quiet_logs


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
    return DTYPE_NAMES[rival.dtype]


def quiet() -> AbstractContextManager[None]:
    """Keep loading bars, and warnings about packages that only sizing would use, off the terminal."""
    return quiet_logs("transformers", "ContinuousBatchingLogger", level=logging.CRITICAL)
