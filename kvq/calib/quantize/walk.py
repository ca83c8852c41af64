"""Pass of text samples through a decoder, one fp32 layer at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kvq.calib.quantize.settings import FEWEST_SAMPLES
from kvq.errors import ModelError, RequestError
from kvq.evals.text import begin_ids, cut_windows, text_ids

_CONTEXT = 2048  # tokens per sample, by default
_PROBE = 64  # tokens of the sample used to prove folds


def draw_samples(  # D174: the text matters more than the method
    tokenizer: Any, text: str, *, samples: int, context: int | None, max_context: int, seed: int
) -> list[list[int]]:
    """Draw at most `samples` random windows of `context` tokens, in text order; `seed` determines the draw.

    If the text has fewer windows, all are used. `context` defaults to 2,048 tokens or the model's maximum, if
    smaller.

    Raises:
        RequestError: `context` exceeds the model's maximum, or the text has fewer than 8 windows.
    """
    size = min(_CONTEXT, max_context) if context is None else context
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


class _Recorded(Exception):
    """Raised once the arguments of all layers have been recorded."""


_Argument = Tensor | tuple[Tensor, ...] | bool | None
# A layer's arguments other than the hidden states
_Call = tuple[tuple[_Argument, ...], dict[str, _Argument]]


def decoder_layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name of the decoder layers' module list, and the layers.

    Raises:
        ModelError: no module list in the model can be identified as its decoder layers.
    """
    count = model.config.num_hidden_layers  # type: ignore[union-attr]
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, list(module)
    raise ModelError(f"{type(model).__name__} has no list of {count} decoder layers to go through")


class Walk:
    """Hidden states of the samples at the input of the current layer.

    Memory: samples * context * hidden size * 4 bytes, plus one layer in fp32.
    """

    def __init__(self, model: Any, windows: list[list[int]], device: torch.device) -> None:
        """Embed the samples, without running any layer."""
        self.device = device
        self.layers = decoder_layers(model)[1]
        self.hidden, self._calls = _record(model, self.layers, windows)
        self._probe_hidden, self._probe_calls = _record(model, self.layers, [windows[0][:_PROBE]])

    @torch.no_grad()
    def see(self, index: int) -> None:
        """Run a layer over all samples, only to trigger its hooks."""
        for hidden in self.hidden:
            self._run(index, hidden, self._calls)

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Run a layer over all samples and replace the hidden states with its outputs.

        Raises:
            RequestError: the outputs are not finite.
        """
        for hidden in [*self.hidden, *self._probe_hidden]:
            calls = self._calls if hidden.shape == self.hidden[0].shape else self._probe_calls
            hidden.copy_(self._run(index, hidden, calls)[0])
            if not torch.isfinite(hidden).all():
                raise RequestError(
                    f"layer {index} makes NaN or infinity of this text; is the checkpoint whole, and its "
                    f"dtype the one that it was trained in?"
                )

    @torch.no_grad()
    def probe(self, index: int) -> Tensor:
        """Return a layer's output on a few tokens, fp32 [1, tokens, hidden]."""
        return self._run(index, self._probe_hidden[0], self._probe_calls)

    def _run(self, index: int, hidden: Tensor, calls: list[_Call]) -> Tensor:
        positional, named = tree_map_only(Tensor, lambda x: x.to(self.device), calls[index])
        output = self.layers[index](hidden[None].to(self.device), *positional, **named)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


@torch.no_grad()
def _record(
    model: Any, layers: list[nn.Module], windows: list[list[int]]
) -> tuple[list[Tensor], list[_Call]]:
    """Return the windows' embeddings, fp32 [tokens, hidden], and layers' arguments for the first window."""
    embedded: list[Tensor] = []
    calls: list[_Call] = []

    def stand_in(index: int) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *positional: _Argument, **named: _Argument) -> Tensor:
            if index == 0:
                embedded.append(hidden_states[0].float().clone())
            if len(calls) == index:
                calls.append((positional, named))
            if len(calls) == len(layers):
                raise _Recorded
            return hidden_states

        return forward

    with _embedding_in_fp32(model), _instead(layers, stand_in):
        for ids in windows:
            try:
                model.base_model(input_ids=torch.tensor([ids]), use_cache=False)
            except _Recorded:
                continue
            raise ModelError(f"{type(model).__name__} does not call its layers one after the other")
    return embedded, calls


@contextmanager
def _instead(layers: list[nn.Module], stand_in: Callable[[int], Callable[..., Tensor]]) -> Iterator[None]:
    for index, layer in enumerate(layers):
        layer.forward = stand_in(index)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def _embedding_in_fp32(model: nn.Module) -> Iterator[None]:
    """Convert embeddings to fp32 while open; positions and masks inherit this dtype."""
    handles = [
        module.register_forward_hook(lambda _, args, output: output.float())
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
