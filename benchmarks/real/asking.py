"""Prompts in a model's own form, and greedy answers from kvq's engine."""

from collections.abc import Sequence
from typing import Any

import kvq
from kvq.engine import LLM, RequestOutput
from kvq.errors import ConfigError
from kvq.evals.scoring import generate
from kvq.evals.text import begin_ids, text_ids
from kvq.evals.watch import Progress
from kvq.models import Model

_SPARE = 1.25  # blocks beyond what the longest prompts need, for what the scheduler holds in reserve


def asked(tokenizer: Any, question: str, begun: str) -> list[int]:
    """Token ids of a question and of the beginning of its answer.

    A tokenizer without a chat template is of a model that goes on with texts: both stand in one.
    """
    if tokenizer.chat_template is None:
        return [*begin_ids(tokenizer), *text_ids(tokenizer, f"{question}\n\n{begun}")]
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return text_ids(tokenizer, text + begun)


def answers(
    model: Model,
    prompts: Sequence[list[int]],
    params: kvq.SamplingParams,
    *,
    at_once: int,
    progress: Progress,
    first_alone: bool = False,
) -> list[RequestOutput]:
    """Answer all prompts; with `first_alone`, others begin when its prefix is in the cache.

    Raises:
        ConfigError: a method that is only simulated, in which nothing can be generated.
        RequestError: a prompt that can't be served.
    """
    if model.recipe.own:
        raise ConfigError(f"{model.recipe.name} is simulated and can't generate; measure texts with it")
    tokens = max(map(len, prompts)) + (params.max_tokens or 0)
    each = -(-(tokens + 1) // model.layout.block_size)
    blocks = int(_SPARE * each * (2 if first_alone else at_once)) + 1
    with LLM(model, max_num_seqs=at_once, max_context=tokens, num_blocks=blocks) as llm:
        head = 1 if first_alone else 0
        found = generate(llm, prompts[:head], [params] * head) if head else []
        rest = prompts[head:]
        if rest:
            found += generate(
                llm,
                rest,
                [params] * len(rest),
                progress=lambda done, _: progress(head + done, len(prompts)),
            )
    return found
