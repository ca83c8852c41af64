"""Options of `kvq eval`, by what they are of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import Size, option

if TYPE_CHECKING:
    from kvq.evals.generation import GenerationPlan
    from kvq.evals.lm_eval_loading import LMEvalPlan
    from kvq.evals.needle import NeedlePlan

_COUNT = click.IntRange(min=1)


def _numbers(of: Any) -> Callable[..., Any]:
    """A callback that reads numbers separated by commas."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        return None if value is None else tuple(of.convert(word, param, ctx) for word in value.split(","))

    return read


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is measured, which limits it must keep, and where results go."""

    text: str | None
    text_field: str | None
    tasks: str = option(
        "--tasks",
        default="perplexity,kl",
        help="Separated by commas: perplexity, kl, generation, attention, needle, and lm_eval:TASK, a task, "
        "a pattern or a YAML file of lm-eval.",
    )
    gates: tuple[str, ...] = option(
        "--gate",
        multiple=True,
        metavar="EXPR",
        help="Exit 1 unless it holds: 'kl_mean<0.01', 'int4:perplexity_change_high<=1%', "
        "'needle.retrieved>=0.95' over the whole grid, 'lm_eval:TASK.acc>=0.6', 'lm_eval.acc_change>=-1%' "
        "against the baseline. May be repeated.",
    )
    attention_windows: int = option(
        "--attention-windows", type=_COUNT, default=8, help="Windows for the attention error."
    )
    resamples: int = option("--resamples", default=2000, help="Of documents, for 95% intervals.")
    seed: int = option("--seed", type=click.IntRange(min=0), default=0, help="Of resampling and of needles.")
    json_path: str | None = option("--json", type=click.Path(), help="Write everything as JSON.")
    html_path: str | None = option(
        "--html", type=click.Path(), help="Write a page that needs no other file, JSON beside it."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """Of single tasks; those of lm_eval are called as lm-eval calls them."""

    prompts: int = option("--prompts", type=_COUNT, default=32, help="Of generation.")
    prompt_tokens: int = option("--prompt-tokens", type=_COUNT, default=128, help="Per prompt.")
    new_tokens: int = option("--new-tokens", type=_COUNT, default=64, help="Generated after each.")
    needle_lengths: tuple[int, ...] | None = option(
        "--needle-lengths",
        metavar="N,...",
        callback=_numbers(_COUNT),
        help="Tokens of prompt and answer.  [default: those of 512,1024,2048,4096 that model and text allow]",
    )
    needle_depths: tuple[float, ...] = option(
        "--needle-depths",
        metavar="X,...",
        callback=_numbers(click.FloatRange(0, 1)),
        default="0,0.25,0.5,0.75,1",
        help="Shares of the text before the needle.",
    )
    needle_trials: int = option(
        "--needle-trials", type=_COUNT, default=10, help="Prompts per length and depth."
    )
    needle: str | None = option(
        "--needle",
        metavar="TEXT",
        help="A sentence with {key} and {value}, or 'tokens', random ones.  [default: The secret number of "
        "{key} is {value}.]",
    )
    needle_distractors: int = option(
        "--needle-distractors", type=click.IntRange(min=0), default=0, help="Needles with other keys."
    )
    include_path: str | None = option(
        "--include-path", type=click.Path(), help="Folder with more task files for lm_eval."
    )
    limit: int | None = option("--limit", type=_COUNT, help="Samples of each lm_eval task.  [default: all]")
    num_fewshot: int | None = option(
        "--num-fewshot",
        type=click.IntRange(min=0),
        help="Examples before each question of lm_eval.  [default: the task's]",
    )
    apply_chat_template: bool = option(
        "--apply-chat-template", is_flag=True, help="Ask lm_eval's questions as a chat."
    )
    kv_memory: str | None = option(
        "--kv-memory",
        type=Size(),
        help="KV pool for lm_eval, such as 2GiB; one format at a time.  [default: from free memory]",
    )

    def generation_plan(self) -> "GenerationPlan":
        """What the task generation does."""
        from kvq.evals.generation import GenerationPlan

        return GenerationPlan(
            prompts=self.prompts, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens
        )

    def needle_plan(self, seed: int, chunk: int | None) -> "NeedlePlan":
        """What the task needle asks, in chunks of its own size for None."""
        from kvq.evals.needle import NeedlePlan
        from kvq.evals.needle_prompts import SENTENCE

        return NeedlePlan(
            lengths=self.needle_lengths,
            depths=self.needle_depths,
            trials=self.needle_trials,
            needle=self.needle or SENTENCE,
            distractors=self.needle_distractors,
            seed=seed,
            **({} if chunk is None else {"chunk": chunk}),
        )

    def lm_eval_plan(self) -> "LMEvalPlan":
        """How tasks of lm-eval are run."""
        from kvq.evals.lm_eval_loading import LMEvalPlan

        names = ("include_path", "limit", "num_fewshot", "apply_chat_template")
        return LMEvalPlan(**{name: getattr(self, name) for name in names})
