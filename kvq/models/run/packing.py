"""Packing of many sequences' tokens into rows, and the model's pass over them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvq.kernels.decoder.whole import ReadyPass
from kvq.models.loading.fused_layers import runs_adapters
from kvq.models.loading.weights import LoadedWeights
from kvq.models.parts.elementwise import invariant_functions
from kvq.models.parts.step import PackedStep

Integers = npt.NDArray[np.int64]
Numbers = Sequence[int] | Integers | Tensor


def are_decodes(counts: Sequence[int]) -> bool:
    """Return True if every sequence has one new token."""
    return set(counts) == {1}


def positions_of(counts: Sequence[int], ends: Sequence[int]) -> Integers:
    """Return new tokens' positions, int64 [tokens]; `counts`, `ends`: sequences' new tokens and lengths."""
    last = np.array(ends)
    if are_decodes(counts):
        positions: Integers = last - 1
        return positions
    new = np.array(counts)
    before = np.cumsum(new) - new  # new tokens of the sequences packed before
    first: Integers = np.repeat(last - new - before, new)
    return first + np.arange(len(first))


def run_packed(
    weights: LoadedWeights, step: PackedStep, tokens: Numbers, positions: Numbers, wanted: Numbers
) -> Tensor:
    """Run a step, in which each layer writes K and V, then attends; return logits of the `wanted` rows.

    `tokens` and `positions` have one value per row. Tensors must be int64 and on the device; other values are
    copied there, which makes the host wait for a GPU. Rows are padded if results would otherwise depend on
    their number.
    """
    ids, where, keep = _laid_out(weights, step, tokens, positions, wanted)
    short = weights.fused_pass
    if short is not None and short.is_free and step.states is None:
        return short(ids, where, keep, step)[: len(wanted)]
    states = nullcontext() if step.states is None else step.states.current()
    functions = invariant_functions() if weights.prepared.exact else nullcontext()
    adapters = None if runs_adapters(weights.model) else step.adapters
    hooks = nullcontext() if adapters is None else adapters.applied(weights.model, len(ids))
    with states, functions, hooks, kept_hidden(weights.model, step):
        output = weights.model(
            input_ids=ids[None], position_ids=where[None], use_cache=False, logits_to_keep=keep, kvq_step=step
        )
    if step.states is not None:
        step.states.write()
    logits: Tensor = output.logits[0, : len(wanted)]
    return logits


def ready_pass(
    weights: LoadedWeights, step: PackedStep, tokens: Numbers, positions: Numbers, wanted: Numbers
) -> ReadyPass | None:
    """Return `run_packed` as a compiled call to start and wait for, or None if there is no compiled form."""
    short = weights.fused_pass
    if short is None or not short.is_whole or step.states is not None:
        return None
    return short.ready(*_laid_out(weights, step, tokens, positions, wanted), step)


def _laid_out(
    weights: LoadedWeights, step: PackedStep, tokens: Numbers, positions: Numbers, wanted: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token ids, positions and wanted rows, padded for the pass; set the step's positions."""
    rows, device = weights.step_rows(len(positions)), weights.device
    step.positions = where = padded(positions, rows, device)
    keep = padded(wanted, weights.logit_rows(len(wanted)), device)
    return padded(tokens, rows, device), where, keep


@contextmanager
def kept_hidden(model: nn.Module, step: PackedStep) -> Iterator[None]:
    """Make a causal model's pass fill in `step.hidden` if the step needs it; otherwise do nothing.

    Draft heads draft from the hidden states after the final norm.
    """
    if not step.keeps_hidden:
        yield
        return

    def keep(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        if given.get("kvq_step") is step:
            step.hidden = output.last_hidden_state[0]

    inner: Any = model.base_model
    hook = inner.register_forward_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def padded(values: Numbers, rows: int, device: torch.device) -> Tensor:
    """Return an int64 tensor [rows] on the device: the values, padded with zeros."""
    if isinstance(values, Tensor):
        return values if len(values) == rows else functional.pad(values, (0, rows - len(values)))
    if len(values) == rows:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
    whole = np.zeros(rows, dtype=np.int64)
    whole[: len(values)] = values
    return torch.from_numpy(whole).to(device)
