"""Options of single tasks of `kvq eval`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvq.commands.options import Size

if TYPE_CHECKING:
    from kvq.evals.needle import NeedlePlan

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _numbers(of: Any) -> Callable[..., Any]:
    """A callback that reads numbers separated by commas."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        return None if value is None else tuple(of.convert(word, param, ctx) for word in value.split(","))

    return read


_NEEDLE = (
    click.option(
        "--needle-lengths",
        metavar="N,...",
        callback=_numbers(click.IntRange(min=1)),
        help="Tokens of prompt and answer.  [default: those of 512,1024,2048,4096 that model and text allow]",
    ),
    click.option(
        "--needle-depths",
        metavar="X,...",
        callback=_numbers(click.FloatRange(0, 1)),
        default="0,0.25,0.5,0.75,1",
        show_default=True,
        help="Shares of the text before the needle.",
    ),
    click.option(
        "--needle-trials",
        type=click.IntRange(min=1),
        default=10,
        show_default=True,
        help="Prompts per length and depth.",
    ),
    click.option(
        "--needle",
        metavar="TEXT",
        help="A sentence with {key} and {value}, or 'tokens', random ones.  [default: The secret number of "
        "{key} is {value}.]",
    ),
    click.option(
        "--needle-distractors",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Needles with other keys.",
    ),
)
_LM_EVAL = (
    click.option("--include-path", type=click.Path(), help="Folder with more task files for lm_eval."),
    click.option("--limit", type=click.IntRange(min=1), help="Samples of each lm_eval task.  [default: all]"),
    click.option(
        "--num-fewshot",
        type=click.IntRange(min=0),
        help="Examples before each question of lm_eval.  [default: the task's]",
    ),
    click.option("--apply-chat-template", is_flag=True, help="Ask lm_eval's questions as a chat."),
    click.option(
        "--kv-memory",
        type=Size(),
        help="KV pool for lm_eval, such as 2GiB; one format at a time.  [default: from free memory]",
    ),
)


def needle_options(command: _Command) -> _Command:
    """Add the options of the task needle."""
    return _add(_NEEDLE, command)


def lm_eval_options(command: _Command) -> _Command:
    """Add the options of the task lm_eval, named as lm-eval names them."""
    return _add(_LM_EVAL, command)


def needle_plan(options: dict[str, Any]) -> "NeedlePlan":
    """Take the needle's options out of all."""
    from kvq.evals.needle import NeedlePlan
    from kvq.evals.needle_prompts import SENTENCE

    names = ("lengths", "depths", "trials", "distractors")
    given = {name: options.pop(f"needle_{name}") for name in names}
    if options["chunk"] is not None:
        given["chunk"] = options["chunk"]
    return NeedlePlan(needle=options.pop("needle") or SENTENCE, seed=options["seed"], **given)


def lm_eval_plan(options: dict[str, Any]) -> dict[str, Any]:
    """Take lm-eval's options out of all: fields of `LMEvalPlan`, which can't be imported without lm-eval."""
    names = ("include_path", "limit", "num_fewshot", "apply_chat_template")
    return {name: options.pop(name) for name in names}


def _add(options: Any, command: _Command) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command
