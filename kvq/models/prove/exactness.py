"""Exactness check: whether a token's results depend on how tokens are divided into steps."""

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from kvq.errors import ModelError
from kvq.layout import KVLayout
from kvq.models.loading.fused_layers import is_fused
from kvq.models.loading.weights import LoadedWeights
from kvq.models.run.session import Session
from kvq.weights.linear import Packed

_log = logging.getLogger("kvq")
_LENGTHS = (75, 9, 40)  # tokens of the checked sequence, then of its neighbours
_CUTS = ((), (1, 17, 18, 21, 58, 59), (33, 70, 71, 72, 73, 74))  # where the sequence is divided into steps
_OWN_TOKENS = 8  # of a neighbour, one per step; its other tokens are in the first step


def check_exact(weights: LoadedWeights, layout: KVLayout) -> None:  # D394: tried, not listed
    """Run a sequence whole, in chunks and beside others: each token's logits must always have the same bits.

    Raises:
        ModelError: they differ; the message names the first module whose results do.
    """
    _log.info("checking that no batch or chunk changes a bit")
    name = _torch_product(weights.model)
    if name is not None and weights.prepared.dtype is not torch.float32:  # rounding hides most differences
        raise ModelError(
            f"{weights.geometry.model_type} can't be exact in 16 bits: {name} is multiplied by torch, whose "
            f"sums may depend on the batch; give dtype=fp32 (--dtype fp32), or leave exact out"
        )
    trial = _Trial(weights, layout)
    wanted = trial.logits((), is_alone=True)
    for cuts in _CUTS:
        for is_alone in (True, False):
            if not torch.equal(trial.logits(cuts, is_alone=is_alone), wanted):
                raise ModelError(
                    f"{weights.geometry.model_type} can't be exact here: {trial.explain(cuts, is_alone)}; "
                    f"leave exact out, or take another model"
                )


def _torch_product(model: nn.Module) -> str | None:
    """Return the name of a weight that torch may multiply by, or None if kvq's kernels have all matrices."""
    for name, module in model.named_modules():
        for part, weight in module.named_parameters(recurse=False):
            if weight.dim() > 1 and not isinstance(module, (Packed, nn.Embedding)):
                return f"{name}.{part}"
    return None


class _Trial:
    """A sequence with neighbours, and the module outputs of its rows."""

    def __init__(self, weights: LoadedWeights, layout: KVLayout) -> None:
        self._weights = weights
        self._layout = layout
        self._rows = 0, 0  # of the current step: the sequence's, and all
        self._lengths = [min(n, weights.max_context) for n in _LENGTHS]

    def logits(self, cuts: Sequence[int], *, is_alone: bool) -> Tensor:
        """Return the sequence's logits, fp32 [tokens, vocab]."""
        vocab = self._weights.geometry.vocab_size
        session = Session(
            self._weights, self._layout, max_tokens=max(self._lengths), max_sequences=len(self._lengths)
        )
        ids, *others = [
            [(31 * i + 977 * s + 5) % vocab for i in range(n)] for s, n in enumerate(self._lengths)
        ]
        sequence, *neighbours = [session.new_sequence() for _ in self._lengths]
        parts = []
        for step, (begin, end) in enumerate(pairwise([0, *(x for x in cuts if x < len(ids)), len(ids)])):
            work = [(sequence, ids[begin:end])]
            for neighbour, tokens in [] if is_alone else zip(neighbours, others, strict=True):
                first = max(1, len(tokens) - _OWN_TOKENS)
                own = tokens[:first] if step == 0 else tokens[first + step - 1 : first + step]
                work += [(neighbour, own)] if own else []
            self._rows = end - begin, sum(len(tokens) for _, tokens in work)
            parts.append(session.forward(work, all_rows=True)[0].trusted_logits())
        return torch.cat(parts)

    def explain(self, cuts: Sequence[int], is_alone: bool) -> str:
        """Return where bits begin to differ from those of the sequence alone and whole."""
        how = "in chunks" if is_alone else "in another batch"
        where = "its forward pass"
        if not is_fused(self._weights.model):  # hooks would unfuse them
            wanted, found = self._outputs((), is_alone=True), self._outputs(cuts, is_alone=is_alone)
            for name, rows in wanted.items():
                other = found.get(name)
                if other is not None and other.shape == rows.shape and not torch.equal(other, rows):
                    kind = type(self._weights.model.get_submodule(name)).__name__
                    where = f"{name} ({kind}), or what feeds it,"
                    break
        return f"{where} gives a token other bits {how}"

    def _outputs(self, cuts: Sequence[int], *, is_alone: bool) -> dict[str, Tensor]:
        """Return the outputs of all modules for the sequence's tokens, in the order of the first step."""
        names = {module: name for name, module in self._weights.model.named_modules()}
        found: dict[str, list[Tensor]] = {}
        hook = register_module_forward_hook(
            lambda module, args, output: self._keep(found.setdefault(names.get(module, ""), []), output)
        )
        try:
            self.logits(cuts, is_alone=is_alone)
        finally:
            hook.remove()
        return {x: torch.cat(rows) for x, rows in found.items() if len({row.shape[1:] for row in rows}) == 1}

    def _keep(self, parts: list[Tensor], output: object) -> None:
        """Append the output's rows of the checked sequence, whose tokens come first in each step."""
        x = output[0] if isinstance(output, tuple) and output else output
        own, rows = self._rows
        if isinstance(x, Tensor) and x.dim() > 1 and x.is_floating_point():
            x = x[0] if x.shape[0] == 1 and x.dim() > 2 else x
            if len(x) == rows:
                parts.append(x[:own].clone())
