"""Generation eval: number of tokens until greedy decoding differs between quantized and unquantized KV."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvq.engine import LLM, SamplingParams
from kvq.engine.build import check_cache
from kvq.errors import RequestError
from kvq.evals.divergence import with_baseline
from kvq.evals.report.bootstrap import Bootstrap, Interval, share_interval
from kvq.evals.text import spread, token_windows
from kvq.evals.watch import UNWATCHED, Watch
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.loading.prepared import PreparedModel
from kvq.models.run.prompts import num_common

_SPARE = 1.25  # factor on the blocks that the prompts need; the scheduler reserves some


@dataclass(frozen=True, kw_only=True, slots=True)
class _Intervals:
    """Bounds at 95% confidence, each [low, high]; None if there are too few prompts."""

    same_tokens_mean: Interval | None
    identical: Interval | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRow:
    """Agreement of one format's continuations with the baseline's."""

    kv: str
    prompts: int
    new_tokens: int  # generated after each prompt
    same_tokens_mean: float  # number of tokens before the first difference; all if there is none
    same_tokens_median: float
    identical: float  # share of prompts with exactly the baseline's continuation
    seconds: float
    intervals: _Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan:
    """Plan to generate `new_tokens` tokens after each of `prompts` pieces of the text."""

    prompts: int = 32
    prompt_tokens: int = 128
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("prompts", "new_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.prompt_tokens < 2:
            raise RequestError(f"prompt_tokens must be at least 2, got {self.prompt_tokens}")


def cut_prompts(model: PreparedModel, text: str, plan: GenerationPlan) -> list[list[int]]:
    """Return evenly spaced pieces of a text as token ids; a short text yields fewer pieces than requested.

    Raises:
        ConfigError: the engine doesn't support the cache backend.
        RequestError: the text is shorter than a prompt, or prompts leave no room for new tokens.
    """
    check_cache(model)
    longest = plan.prompt_tokens + plan.new_tokens
    if longest > model.max_context:
        raise RequestError(
            f"prompts of {plan.prompt_tokens} tokens and {plan.new_tokens} new ones are beyond this model's "
            f"context of {model.max_context}; ask for fewer"
        )
    return spread(token_windows(model.tokenizer, text, context=plan.prompt_tokens), plan.prompts)


def measure_generation(
    model: Model,
    kv: Sequence[str | KVRecipe],
    text: str,
    plan: GenerationPlan = GenerationPlan(),
    bootstrap: Bootstrap | None = None,
    watch: Watch = UNWATCHED,
) -> list[GenerationRow]:
    """Continue pieces of a text by greedy decoding in every format; the baseline's row comes first.

    Generation ignores end tokens, so all continuations are equally long.

    Raises:
        RequestError: the text is shorter than a prompt, a length exceeds the model's context, or K, V or
            logits are not finite.
        ConfigError: a format is unknown, doesn't fit the model, or lacks its scales.
    """
    bootstrap = bootstrap or Bootstrap()
    models = with_baseline(model, kv)
    prompts = cut_prompts(model.prepared, text, plan)
    total = len(models) * len(prompts)
    expected: list[list[int]] | None = None
    rows = []
    for index, one in enumerate(models):
        began = time.perf_counter()
        done = index * len(prompts)
        got = _continuations(one, prompts, plan, lambda n, _, done=done: watch.progress(done + n, total))
        seconds = time.perf_counter() - began
        expected = expected or got
        rows.append(_row(one.recipe.name, expected, got, seconds, bootstrap))
        watch.keep(rows.copy)
    return rows


def _continuations(
    model: Model, prompts: list[list[int]], plan: GenerationPlan, progress: Callable[..., None]
) -> list[list[int]]:
    blocks = -(-(plan.prompt_tokens + plan.new_tokens + 1) // model.layout.block_size)
    params = SamplingParams(max_tokens=plan.new_tokens, ignore_eos=True)
    with LLM(
        model,
        max_num_seqs=len(prompts),
        max_context=plan.prompt_tokens + plan.new_tokens,
        num_blocks=int(_SPARE * blocks * len(prompts)) + 1,
    ) as llm:
        outputs = llm.generate(prompts, params, progress=progress)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0].token_ids for output in outputs]


def _row(
    label: str, expected: list[list[int]], got: list[list[int]], seconds: float, bootstrap: Bootstrap
) -> GenerationRow:
    same = np.array([num_common(a, b) for a, b in zip(expected, got, strict=True)])
    identical = sum(a == b for a, b in zip(expected, got, strict=True))
    return GenerationRow(
        kv=label,
        prompts=len(got),
        new_tokens=len(got[0]),
        same_tokens_mean=float(same.mean()),
        same_tokens_median=float(np.median(same)),
        identical=identical / len(got),
        seconds=seconds,
        intervals=_Intervals(
            same_tokens_mean=bootstrap.interval(lambda mean: mean, same),
            identical=share_interval(identical, len(got)),
        ),
    )
