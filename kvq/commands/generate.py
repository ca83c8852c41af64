"""`kvq generate`: text from a prompt, streamed, over quantized KV."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from kvq.commands.options import ModelOptions, gathered, kv_option, model_options
from kvq.commands.screen import echo, stream

if TYPE_CHECKING:
    from kvq.engine import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the text is chosen, as the command line says it."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    json_schema: str | None
    regex: str | None

    def params(self) -> "SamplingParams":
        """As the engine takes it."""
        from kvq.engine import SamplingParams, StructuredOutput

        given = asdict(self)
        grammar = {name: given.pop(name) for name in ("json_schema", "regex")}
        is_free = self.json_schema is None and self.regex is None
        return SamplingParams(structured=None if is_free else StructuredOutput(**grammar), **given)


@click.command(name="generate")
@click.argument("prompt")
@kv_option("auto", many=False)
@model_options
@click.option("--max-tokens", "-n", default=64, show_default=True, help="Tokens to generate at most.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, help="Keep this many of the likeliest tokens.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Nucleus sampling: keep this share of probability."
)
@click.option(
    "--min-p", default=0.0, show_default=True, help="Drop tokens below this share of the likeliest."
)
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1 discourages repetition.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-text token.")
@click.option("--json-schema", help="The text must be JSON of this schema.")
@click.option("--regex", help="The text must match this regular expression.")
@gathered(Sampling, "sampling")
def command(
    prompt: str,
    kv: list[str],
    model_options: ModelOptions,
    sampling: Sampling,
) -> None:
    """Go on from PROMPT, streamed to standard output."""
    from kvq.commands.loading import check_for
    from kvq.engine import LLM
    from kvq.engine.build import check_cache
    from kvq.engine.grammar.compiler import check_structured
    from kvq.engine.prompts import prompt_tokens
    from kvq.models.prompts import check_length, longest_token
    from kvq.scheduler.fit import check_room

    params = sampling.params()
    if params.structured is not None:
        check_structured(params.structured)
    checked = check_for(model_options, kv)
    known = checked.prepared
    check_cache(known)
    check_length(prompt, known.max_context, longest_token(known.tokenizer))
    length = len(prompt_tokens(prompt, known.tokenizer, known.geometry.vocab_size))
    room = check_room(length, params.max_tokens, known.max_context)
    model = checked.load()
    with LLM(model, kv[0], max_num_seqs=1, max_context=length + (params.max_tokens or room)) as llm:
        pieces = llm.stream(prompt, params)
        shown = prompt
        for piece in pieces:
            stream(shown + piece.text)
            shown = ""
    echo()
