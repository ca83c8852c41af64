"""How far KV formats go from unquantized KV at every token of a text, over the path that serves.

What stays of a token is a few numbers, never its logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvq.errors import RequestError
from kvq.evals.side_by_side import Chunk, chunk_size, side_by_side
from kvq.evals.text import EvalText
from kvq.evals.windows import token_windows
from kvq.formats import Code, KVRecipe
from kvq.models import Model, Session
from kvq.models.prepared import PreparedModel

Progress = Callable[[int, int], None]  # (steps done, steps in all)
Keep = Callable[[Callable[[], list[Any]]], object]  # told how to make what is finished now
Figures = npt.NDArray[np.float32]

INSTRUMENT_WINDOW = 64  # tokens
INSTRUMENT_FORMAT = "int2"
_TOP = 5  # likeliest tokens compared


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlan:
    """What formats are run over: windows of a text, and how they are cut."""

    context: int = 1024  # tokens per window
    chunk: int | None = None  # tokens per prefill step
    max_windows: int | None = None
    attention_window: int | None = None  # tokens; shortens attention for all
    instrument: bool = False  # append two that must look bad if model and text can show damage at all

    def __post_init__(self) -> None:
        if self.attention_window is not None and self.attention_window < 1:
            raise RequestError(f"the attention window must be at least 1 token, got {self.attention_window}")
        if self.chunk is not None and self.chunk < 1:
            raise RequestError(f"chunk must be at least 1 token, got {self.chunk}")


class TokenKeywords(TypedDict, total=False):
    """Fields of `TokenPlan` as keywords."""

    context: int
    chunk: int | None
    max_windows: int | None
    attention_window: int | None
    instrument: bool


class MeasureKeywords(TokenKeywords, total=False):
    """The same, and who is told how far it is."""

    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenFigures:
    """What one format did at every predicted token: fp32 [windows, context - 1] each.

    A window is a document. Column i of it was predicted from i + 1 tokens.
    """

    label: str
    model: Model
    nll: Figures  # nats
    kl: Figures  # nats, of this format from the baseline
    top1: Figures  # 1 where the likeliest token is the baseline's, else 0
    top5: Figures  # share of the baseline's five likeliest among this format's five
    seconds: float  # of the forward passes
    window_limit: int | None = None  # tokens, when attention was cut short on purpose
    role: str = ""  # "window" or "int2": the rows that check the instrument
    is_baseline: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that were predicted."""
        return self.nll.size


@dataclass(kw_only=True, slots=True, eq=False)
class _Candidate:
    """One format on its way through the text."""

    model: Model
    session: Session
    window_limit: int | None
    role: str
    kept: dict[str, Tensor]  # fp32 [windows, context - 1] on the CPU; small pieces would fragment the heap
    seconds: float = 0.0

    def figures(self, is_baseline: bool, windows: int) -> TokenFigures:
        """What was measured on the first so many windows."""
        return TokenFigures(
            label=self.model.recipe.name,
            model=self.model,
            **{name: buffer[:windows].numpy() for name, buffer in self.kept.items()},
            seconds=self.seconds,
            window_limit=self.window_limit,
            role=self.role,
            is_baseline=is_baseline,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """The baseline at the tokens of one chunk."""

    log_probs: Tensor  # fp32 [tokens, vocab]
    probs: Tensor
    top1: Tensor  # int64 [tokens]
    top5: Tensor  # int64 [tokens, 5]

    @classmethod
    def of(cls, log_probs: Tensor) -> "_Reference":
        """What the others are compared with, computed once for all of them."""
        return cls(log_probs, log_probs.exp(), log_probs.argmax(-1), _likeliest(log_probs))


def measure_tokens(
    model: Model,
    kv: str | list[str | KVRecipe],
    text: str,
    *,
    progress: Progress = lambda done, total: None,
    keep: Keep = lambda make: None,
    **options: Unpack[TokenKeywords],
) -> list[TokenFigures]:
    """Run formats over a text beside the first unquantized one among them, which comes back first.

    If all are quantized, the weights' own type goes first as the baseline. Options are those of `TokenPlan`;
    `instrument` appends the baseline with a 64-token attention window, and 2-bit KV. `keep` is told after
    every window how to make the figures of all windows so far.

    Raises:
        RequestError: text shorter than a window, or a context beyond the model's.
        ConfigError: a format that is unknown, doesn't fit, or lacks its scales.
    """
    models, plan = with_baseline(model, kv), TokenPlan(**options)
    check_context(model.prepared, plan.context)
    context, chunk = plan.context, plan.chunk
    size = chunk_size(model, context) if chunk is None else min(chunk, context)
    windows = token_windows(model.tokenizer, text, context=context, max_windows=plan.max_windows)
    candidates = _candidates(models, len(windows), plan)
    per_window = -(-context // size) * len(candidates)
    chunks = side_by_side([candidate.session for candidate in candidates], windows, size)
    for done, found in enumerate(chunks, start=1):
        targets = windows[found.window][found.at + 1 : found.at + size + 1]  # one less at a window's end
        if found.session == 0:
            reference = _Reference.of(found.log_probs[: len(targets)])
        _account(candidates[found.session], found, reference, targets)
        progress(done, len(windows) * per_window)
        if done % per_window == 0:
            keep(partial(_figures, candidates, found.window + 1))
    return _figures(candidates, len(windows))


def _figures(candidates: list[_Candidate], windows: int) -> list[TokenFigures]:
    """Of the first so many windows; the first candidate is the baseline."""
    return [c.figures(c is candidates[0], windows) for c in candidates]


def with_baseline(model: Model, kv: str | list[str | KVRecipe]) -> list[Model]:
    """The model in every format, the baseline first: the first unquantized one, or the weights' own type.

    Raises:
        RequestError: no format.
        ConfigError: a format that is unknown, doesn't fit, or lacks its scales.
    """
    named = [kv] if isinstance(kv, str) else kv
    if not named:
        raise RequestError("no KV format was named; try fp32,int8,int4")
    known = model.prepared
    recipes = baseline_first([known.recipe(name, model.static_scales) for name in named], known)
    return [model.with_kv(recipe) for recipe in recipes]


def baseline_first(recipes: list[KVRecipe], model: PreparedModel) -> list[KVRecipe]:
    """The recipes with the first unquantized one in front; if there is none, the weights' own type."""
    if all(recipe.is_quantized for recipe in recipes):
        recipes = [model.recipe("auto"), *recipes]
    baseline = next(recipe for recipe in recipes if not recipe.is_quantized)
    return sorted(recipes, key=lambda recipe: recipe is not baseline)  # stable


def check_windows(model: PreparedModel, text: EvalText, *, context: int, max_windows: int | None) -> None:
    """Raise RequestError if a text can't be cut into such windows; asked before the weights are loaded."""
    check_context(model, context)
    token_windows(model.tokenizer, text.text, context=context, max_windows=max_windows)


def check_context(model: PreparedModel, context: int) -> None:
    """Raise RequestError if windows of that many tokens are beyond the model's context."""
    if context > model.max_context:
        raise RequestError(
            f"--context {context} is beyond this model's context of {model.max_context} tokens"
        )


def _candidates(models: list[Model], windows: int, plan: TokenPlan) -> list[_Candidate]:
    window = plan.attention_window
    wanted = [(m, window, "int2" if plan.instrument and _is_int2(m) else "") for m in models]
    if plan.instrument:
        wanted.append((models[0], INSTRUMENT_WINDOW, "window"))
        if not any(map(_is_int2, models)):
            wanted.append((models[0].with_kv(INSTRUMENT_FORMAT), window, "int2"))
    made = []
    for m, limit, role in wanted:
        session = m.session(max_tokens=plan.context)
        session.window_limit = limit
        kept = {name: torch.zeros(windows, plan.context - 1) for name in ("nll", "kl", "top1", "top5")}
        made.append(_Candidate(model=m, session=session, window_limit=limit, role=role, kept=kept))
    return made


def _is_int2(model: Model) -> bool:
    """True if K and V of every layer are stored in 2 bits."""
    return all(layer.k.code is layer.v.code is Code.INT2 for layer in model.recipe.layers)


def _account(candidate: _Candidate, chunk: Chunk, reference: _Reference, targets: list[int]) -> None:
    """Keep the figures of a chunk, of as many tokens as there are targets."""
    candidate.seconds += chunk.seconds
    if not targets:
        return
    log_probs, kept = chunk.log_probs[: len(targets)], candidate.kept
    target = torch.tensor(targets, device=log_probs.device)
    place = chunk.window, slice(chunk.at, chunk.at + len(targets))
    kept["nll"][place] = -log_probs.gather(1, target[:, None])[:, 0]
    kept["kl"][place] = (reference.probs * (reference.log_probs - log_probs)).sum(-1)
    kept["top1"][place] = (log_probs.argmax(-1) == reference.top1).float()
    same = reference.top5[:, :, None] == _likeliest(log_probs)[:, None, :]  # [tokens, 5, 5]
    kept["top5"][place] = same.any(-1).float().mean(-1)


def _likeliest(log_probs: Tensor) -> Tensor:
    """int64 [tokens, 5], or as many as there are tokens."""
    return log_probs.topk(min(_TOP, log_probs.shape[-1]), dim=-1).indices
