"""Windows of a text that a model is calibrated on."""

from typing import Any

import torch

from kvq.calib.quantize.settings import FEWEST_SAMPLES
from kvq.errors import RequestError
from kvq.evals.windows import begin_ids, cut_windows, text_ids

DEFAULT_CONTEXT = 2048


def draw_samples(
    tokenizer: Any, text: str, *, samples: int, context: int | None, max_context: int, seed: int
) -> list[list[int]]:
    """At most `samples` windows of `context` tokens, drawn by seed, in the order of the text.

    A text with fewer windows gives all it has. `context` defaults to 2,048 tokens, what the model takes.

    Raises:
        RequestError: a context beyond the model's, or a text of fewer than 8 windows.
    """
    size = min(DEFAULT_CONTEXT, max_context) if context is None else context
    if not 2 <= size <= max_context:
        raise RequestError(f"a context of {size} tokens was asked for; this model takes 2 to {max_context}")
    ids, prefix = text_ids(tokenizer, text), begin_ids(tokenizer)
    tokens, step = len(ids), size - len(prefix)
    if tokens // step < FEWEST_SAMPLES:
        fits = tokens // FEWEST_SAMPLES
        raise RequestError(
            f"the text has {tokens:,} tokens; {FEWEST_SAMPLES} samples of {size:,} need "
            f"{FEWEST_SAMPLES * step:,}: give a longer text"
            + (f", or --context {fits} or less" if fits >= 16 else "")
        )
    windows = cut_windows(ids, prefix, context=size)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(windows), generator=generator)[:samples].sort().values
    return [windows[i] for i in chosen.tolist()]
