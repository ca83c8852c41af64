"""Options of `kvq eval`, for the entire run and for single tasks."""

from dataclasses import dataclass

import click

from kvq.commands.shared.declare import option, path_option
from kvq.commands.shared.param_types import AT_LEAST_1, NATURAL, SIZE, TO_READ, TOKENS, Finite, Several


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """Options for tasks, gates, paths of results, and single tasks."""

    text: str | None
    text_field: str | None
    tasks: str = option(
        "perplexity,kl",
        "Separated by commas: perplexity, kl, generation, attention, needle, and lm_eval:TASK, a task, "
        "a pattern or a YAML file of lm-eval.",
    )
    simulate: tuple[str, ...] = option(
        (),
        "Other projects' methods to measure, too, in a simulation: such as kivi-k2v2+recent=128,kvarn-k4v2; "
        "they can't be served.",
        type=Several(click.STRING, "name,..."),
    )
    gates: tuple[str, ...] = option(
        (),
        "Exit 1 unless it holds: 'kl_mean<0.01', 'int4:perplexity_change_high<=1%', "
        "'needle.retrieved>=0.95' over the whole grid, 'lm_eval:TASK.acc>=0.6', "
        "'lm_eval.acc_change>=-1%' against the baseline. May be repeated.",
        names="--gate",
        multiple=True,
    )
    attention_windows: int = option(8, "Windows for the attention error.", type=AT_LEAST_1)
    resamples: int = option(2000, "Resamples of documents, for 95% intervals.")
    seed: int = option(0, "Seed of resampling and of needles.", type=NATURAL)
    json_path: str | None = path_option("--json", "Write everything as JSON.")
    html_path: str | None = path_option("--html", "Write a self-contained page, and JSON beside it.")
    # Options of single tasks; those of lm_eval have lm-eval's names
    prompts: int = option(32, "Prompts of generation.", type=AT_LEAST_1)
    prompt_tokens: int = option(128, "Tokens of each prompt.", type=TOKENS)
    new_tokens: int = option(64, "Tokens generated after each prompt.", type=TOKENS)
    needle_lengths: tuple[int, ...] | None = option(
        None,
        "Tokens of prompt and answer.  [default: those of 512,1024,2048,4096 that model and text allow]",
        type=Several(TOKENS, "n,..."),
    )
    needle_depths: tuple[float, ...] = option(
        "0,0.25,0.5,0.75,1", "Shares of the text before the needle.", type=Several(Finite(0, 1), "x,...")
    )
    needle_trials: int = option(10, "Prompts per length and depth.", type=AT_LEAST_1)
    needle: str | None = option(
        None,
        "Sentence with {key} and {value}, or 'tokens' for random tokens.  [default: The secret number of "
        "{key} is {value}.]",
    )
    needle_distractors: int = option(0, "Further needles with other keys.", type=NATURAL)
    include_path: str | None = path_option(
        "--include-path", "Folder of more tasks for lm_eval.", type=TO_READ
    )
    limit: int | None = option(None, "Samples of each lm_eval task.  [default: all]", type=AT_LEAST_1)
    num_fewshot: int | None = option(
        None, "Examples before each question of lm_eval.  [default: the task's]", type=NATURAL
    )
    apply_chat_template: bool = option(False, "Ask lm_eval's questions as a chat.")
    kv_memory: str | None = option(
        None,
        "KV pool for lm_eval, such as 2GiB; one format at a time.  [default: from free memory]",
        type=SIZE,
    )
