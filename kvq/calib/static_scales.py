"""Static scales, first form: absolute maxima per KV head, seen through the real attention path."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.errors import RequestError
from kvq.evals.text import EvalText
from kvq.evals.windows import token_windows
from kvq.formats import HeadMaxima, StaticScales
from kvq.kernels.codec import rotate
from kvq.models import Model


class _Maxima:
    """Running absolute maxima of one layer."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def update(self, k: Tensor, v: Tensor) -> None:
        """Take in K and V rows, [tokens, kv_heads, dim] each."""
        for name, rows in (("k", k), ("v", v), ("k_rotated", rotate(k)), ("v_rotated", rotate(v))):
            top = rows.float().abs().amax(dim=(0, 2))  # [kv_heads]
            self.seen[name] = torch.maximum(self.seen[name], top) if name in self.seen else top

    def result(self) -> HeadMaxima:
        """The maxima as numbers."""
        return HeadMaxima(**{name: tuple(top.tolist()) for name, top in self.seen.items()})


def calibrate(
    model: Model,
    text: EvalText | str,
    *,
    context: int | None = None,
    max_windows: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> StaticScales:
    """Observe K (after RoPE) and V of every layer while a text runs over unquantized KV.

    At most `max_windows` windows of `context` tokens are taken, spread evenly over the text; a
    text shorter than one window is taken whole. `context` defaults to 1,024 tokens or what the
    model can take.

    Raises:
        RequestError: a text of fewer than two tokens, a context beyond the model's, no windows, or
            K or V that are not finite.
    """
    if isinstance(text, str):
        text = EvalText(name="text", text=text)
    if max_windows < 1:
        raise RequestError(f"the number of windows must be at least 1, got {max_windows}")
    limit = model.weights.max_context
    context = min(1024, limit) if context is None else context
    if not 2 <= context <= limit:
        raise RequestError(f"a context of {context} tokens was asked for; this model takes 2 to {limit}")
    unquantized = model.with_kv("fp32")
    windows = _spread(model, text.text, context, max_windows)
    layers = [_Maxima() for _ in model.geometry.layers]
    session = unquantized.session(max_tokens=context)
    session.observer = lambda layer, k, v: layers[layer].update(k, v)
    for done, ids in enumerate(windows, start=1):
        sequence = session.new_sequence()
        session.forward([(sequence, ids)])[0].trusted_logits()
        session.free(sequence)
        progress(done, len(windows))
    return StaticScales(
        model_digest=model.weights.digest,
        text_digest=text.digest,
        tokens=sum(map(len, windows)),
        layers=tuple(layer.result() for layer in layers),
    )


def _spread(model: Model, text: str, context: int, max_windows: int) -> list[list[int]]:
    tokens = len(model.tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])
    windows = token_windows(model.tokenizer, text, context=max(2, min(context, tokens)))
    count = min(max_windows, len(windows))
    return [windows[i * len(windows) // count] for i in range(count)]
