"""Divergence of KV formats from unquantized KV at every token of a text, on the path that serves requests.

Only a few numbers per token are kept, never the logits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvq.errors import RequestError
from kvq.evals.exact_tail import check_exact
from kvq.evals.side_by_side import Chunk, chunk_size, side_by_side
from kvq.evals.text import token_windows
from kvq.evals.watch import UNWATCHED, Watch
from kvq.formats import Code, KVRecipe
from kvq.models import Model, Session
from kvq.models.check.verdict import chance_perplexity
from kvq.models.loading.prepared import PreparedModel

Figures = npt.NDArray[np.float32]

INSTRUMENT_WINDOW = 64  # tokens
INSTRUMENT_FORMAT = "int2"
_TOP = 5  # number of most likely tokens that are compared


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlan:
    """Plan that divides a text into windows for measuring formats."""

    context: int = 1024  # tokens per window
    chunk: int | None = None  # tokens per prefill step
    max_windows: int | None = None
    attention_window: int | None = None  # tokens; limits attention in all formats
    instrument: bool = False  # append two rows that look bad if model and text can show damage

    def __post_init__(self) -> None:
        if self.attention_window is not None and self.attention_window < 1:
            raise RequestError(f"the attention window must be at least 1 token, got {self.attention_window}")
        if self.chunk is not None and self.chunk < 1:
            raise RequestError(f"chunk must be at least 1 token, got {self.chunk}")

    def windows(self, model: PreparedModel, text: str) -> list[list[int]]:
        """Return the windows of a text as token ids. The weights need not be loaded.

        Raises:
            RequestError: the text is shorter than a window, or the context exceeds the model's.
        """
        if self.context > model.max_context:
            raise RequestError(
                f"--context {self.context} is beyond this model's context of {model.max_context} tokens"
            )
        return token_windows(model.tokenizer, text, context=self.context, max_windows=self.max_windows)

    def check_exact(self, model: PreparedModel, recipes: Iterable[KVRecipe]) -> list[str]:
        """Return warnings about recipes that leave most keys of a window exact.

        Raises:
            ConfigError: a recipe leaves all keys exact.
        """
        longer = "--context" if self.attention_window is None else "--attention-window"
        return check_exact(
            model,
            recipes,
            [range(self.context - 1)],
            advice=f"give a longer {longer}, or fewer tokens in +recent and +sinks",
            attention_window=self.attention_window,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class TokenFigures:
    """Figures of one format for every predicted token, each an fp32 array [windows, context - 1].

    Each window is a document. Column i is predicted from i + 1 tokens. Each array is allocated as one piece,
    because small allocations would fragment the heap.
    """

    model: Model
    nll: Figures  # nats
    kl: Figures  # nats, divergence of this format from the baseline
    top1: Figures  # 1 where the most likely token is the same as the baseline's, else 0
    top5: Figures  # share of the baseline's five most likely tokens among this format's
    seconds: float = 0.0  # of the forward passes
    window_limit: int | None = None  # tokens, if attention was limited on purpose
    role: str = ""  # "window" or "int2" in rows that check the instrument
    chance: float = float("inf")  # set in the baseline: perplexity of guessing, over all windows

    def first(self, windows: int) -> "TokenFigures":
        """Return the figures of the first `windows` windows."""
        nll, kl, top1, top5 = (x[:windows] for x in (self.nll, self.kl, self.top1, self.top5))
        return replace(self, nll=nll, kl=kl, top1=top1, top5=top5)

    def take(self, chunk: Chunk, reference: "Reference", targets: list[int]) -> None:
        """Store the figures of a chunk for the tokens that have a target."""
        self.seconds += chunk.seconds
        if not targets:
            return
        log_probs = chunk.log_probs[: len(targets)]
        target = torch.tensor(targets, device=log_probs.device)
        same = reference.top5[:, :, None] == _likeliest(log_probs)[:, None, :]  # [tokens, 5, 5]
        place = chunk.window, slice(chunk.at, chunk.at + len(targets))
        self.nll[place] = -log_probs.gather(1, target[:, None])[:, 0].cpu()
        self.kl[place] = (reference.log_probs - log_probs).mul_(reference.probs).sum(-1).cpu()
        self.top1[place] = (log_probs.argmax(-1) == reference.top1).float().cpu()
        self.top5[place] = same.any(-1).float().mean(-1).cpu()


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Baseline's predictions for the tokens of one chunk."""

    log_probs: Tensor  # fp32 [tokens, vocab]
    probs: Tensor
    top1: Tensor  # int64 [tokens]
    top5: Tensor  # int64 [tokens, 5]

    @classmethod
    def of(cls, log_probs: Tensor) -> "Reference":
        """Return the reference for all other formats, with everything computed once."""
        return cls(log_probs, log_probs.exp(), log_probs.argmax(-1), _likeliest(log_probs))


def measure_tokens(
    model: Model, kv: str | Sequence[str | KVRecipe], text: str, plan: TokenPlan, watch: Watch = UNWATCHED
) -> list[TokenFigures]:
    """Run formats over a text alongside the baseline, the first unquantized format, which is returned first.
    If all formats are quantized, the weights' dtype is added as the baseline. If the plan's `instrument` is
    set, the baseline with a 64-token attention window and 2-bit KV are appended. After every window, `watch`
    receives a function that returns the figures of all windows so far.

    Raises:
        RequestError: the text is shorter than a window, or the context exceeds the model's.
        ConfigError: a format is unknown, doesn't fit, lacks its scales, or keeps entire windows exact.
    """
    models = with_baseline(model, kv)
    plan.check_exact(model.prepared, [one.recipe for one in models])
    windows = plan.windows(model.prepared, text)
    size = min(plan.chunk or chunk_size(model, plan.context), plan.context)
    pairs = _candidates(models, len(windows), plan)
    found = [figures for _, figures in pairs]
    found[0].chance = chance_perplexity(np.array(windows)[:, 1:].ravel(), model.geometry.vocab_size)
    per_window = -(-plan.context // size) * len(found)
    chunks = side_by_side([session for session, _ in pairs], windows, size)
    for done, chunk in enumerate(chunks, start=1):
        targets = windows[chunk.window][chunk.at + 1 : chunk.at + size + 1]  # one fewer at a window's end
        if chunk.session == 0:
            reference = Reference.of(chunk.log_probs[: len(targets)])
        found[chunk.session].take(chunk, reference, targets)
        watch.progress(done, len(windows) * per_window)
        if done % per_window == 0:
            watch.keep(partial(lambda windows: [one.first(windows) for one in found], chunk.window + 1))
    return found


def with_baseline(model: Model, kv: str | Sequence[str | KVRecipe]) -> list[Model]:
    """Return the model in every format, starting with the baseline; see `baseline_first`.

    Raises:
        RequestError: no format is named.
        ConfigError: a format is unknown, doesn't fit the model, or lacks its scales.
    """
    named = [kv] if isinstance(kv, str) else kv
    if not named:
        raise RequestError("no KV format was named; try fp32,int8,int4")
    known = model.prepared
    recipes = [known.recipe(x, model.static_scales) for x in named]
    recipes = baseline_first(recipes, known)
    return [model.with_kv(recipe) for recipe in recipes]


def baseline_first(recipes: list[KVRecipe], model: PreparedModel) -> list[KVRecipe]:
    """Return the recipes with the baseline first: an unquantized recipe, or else the weights' dtype."""
    if all(recipe.is_quantized for recipe in recipes):
        recipes = [model.recipe("auto"), *recipes]
    baseline = next(recipe for recipe in recipes if not recipe.is_quantized)
    return sorted(recipes, key=lambda recipe: recipe is not baseline)  # stable


def _candidates(models: list[Model], windows: int, plan: TokenPlan) -> list[tuple[Session, TokenFigures]]:
    limit = plan.attention_window
    wanted = [(m, limit, "int2" if plan.instrument and _is_int2(m) else "") for m in models]
    if plan.instrument:
        wanted.append((models[0], INSTRUMENT_WINDOW, "window"))
        if not any(map(_is_int2, models)):
            wanted.append((models[0].with_kv(INSTRUMENT_FORMAT), limit, "int2"))
    made = []
    for model, window_limit, role in wanted:
        session = model.session(max_tokens=plan.context)
        session.window_limit = window_limit
        nll, kl, top1, top5 = np.zeros((4, windows, plan.context - 1), np.float32)
        figures = TokenFigures(
            model=model, nll=nll, kl=kl, top1=top1, top5=top5, window_limit=window_limit, role=role
        )
        made.append((session, figures))
    return made


def _is_int2(model: Model) -> bool:
    """Return True if K and V of every layer are stored in 2 bits."""
    return all(layer.k.code is layer.v.code is Code.INT2 for layer in model.recipe.layers)


def _likeliest(log_probs: Tensor) -> Tensor:
    """Return the most likely token ids, int64 [tokens, 5], or fewer columns for a smaller vocabulary."""
    return log_probs.topk(min(_TOP, log_probs.shape[-1]), dim=-1).indices
