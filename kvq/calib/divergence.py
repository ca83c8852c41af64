"""Mean KL divergence of many recipes from unquantized KV, over the path that serves."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvq.blockmgr import Sequence as BlockSequence
from kvq.formats import KVRecipe
from kvq.models import Model, Session

_AT_ONCE = 12  # recipes that share a run of the baseline; each has a pool of one window
_LOGITS_BYTES = 256 << 20  # of one chunk

Progress = Callable[[list[float]], None]  # (divergences of the recipes so far)


def mean_divergences(
    model: Model,
    recipes: Sequence[KVRecipe],
    windows: Sequence[list[int]],
    progress: Progress = lambda found: None,
) -> list[float]:
    """Nats per token, one number per recipe, over all tokens of `windows`.

    Every window's tokens go through a session's write-then-read path: quantized into blocks first,
    attended from there. The baseline is the weights' own type.

    Raises:
        RequestError: K or V that are not finite.
        ConfigError: a recipe that does not fit the model.
    """
    found: list[float] = []
    for at in range(0, len(recipes), _AT_ONCE):
        found += _together(model, recipes[at : at + _AT_ONCE], windows)
        progress(found)
    return found


def _together(model: Model, recipes: Sequence[KVRecipe], windows: Sequence[list[int]]) -> list[float]:
    context = max(map(len, windows))
    size = max(1, min(context, _LOGITS_BYTES // (4 * model.geometry.vocab_size)))
    models = [model.with_kv("auto"), *map(model.with_kv, recipes)]
    sessions = [one.session(max_tokens=context) for one in models]
    totals = torch.zeros(len(recipes), dtype=torch.float64)
    for ids in windows:
        sequences = [session.new_sequence() for session in sessions]
        for start in range(0, len(ids), size):
            chunk = ids[start : start + size]
            reference = _log_probs(sessions[0], sequences[0], chunk)
            weights = reference.exp()
            for i, (session, sequence) in enumerate(zip(sessions[1:], sequences[1:], strict=True)):
                totals[i] += float((weights * (reference - _log_probs(session, sequence, chunk))).sum())
        for session, sequence in zip(sessions, sequences, strict=True):
            session.free(sequence)
    return (totals / sum(map(len, windows))).tolist()


def _log_probs(session: Session, sequence: BlockSequence, ids: list[int]) -> Tensor:
    """fp32 [tokens, vocab]."""
    result = session.forward([(sequence, ids)], all_rows=True)[0]
    return torch.log_softmax(result.trusted_logits(), dim=-1)
