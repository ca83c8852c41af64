"""`kvq generate`: streamed text generation from a prompt, with quantized KV."""

from dataclasses import asdict, dataclass
from os.path import isfile, join
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import SectionedCommand, gathered, option, path_option
from kvq.commands.shared.options import (
    ACCEPT,
    GENERATION_CONFIG,
    SPECULATION,
    ModelOptions,
    kv_option,
    model_options,
)
from kvq.commands.shared.param_types import TO_READ, TokenCount
from kvq.commands.shared.terminal import echo, say_defaults, stream
from kvq.errors import ConfigError

if TYPE_CHECKING:
    from kvq.engine import SamplingParams
    from kvq.engine.requests.defaults import SamplingDefaults


@dataclass(frozen=True, kw_only=True, slots=True)
class _SamplingOptions:
    max_tokens: int | None = option(
        None, "Most tokens to generate.  [default: 64]", names="--max-tokens -n", type=TokenCount()
    )
    temperature: float | None = option(None, "0 takes the likeliest token.  [default: 0]", type=float)
    top_k: int | None = option(None, "Keep this many of the likeliest tokens.", type=int)
    top_p: float | None = option(None, "Keep this share of probability.  [default: 1]", type=float)
    min_p: float | None = option(
        None, "Least share of the likeliest token's probability.  [default: 0]", type=float
    )
    repetition_penalty: float | None = option(
        None, "Above 1 discourages repetition.  [default: 1]", type=float
    )
    seed: int | None = option(None, "Makes sampling repeatable.", type=int)
    stop: tuple[str, ...] = option((), "End before this text; may be given several times.", multiple=True)
    ignore_eos: bool = option(False, "Continue after the end-of-text token.")
    json_schema: str | None = option(None, "The text must be JSON of this schema.")
    regex: str | None = option(None, "The text must match this regular expression.")

    def params(self, defaults: "SamplingDefaults | None" = None) -> "SamplingParams":
        """Return the engine's parameters; `defaults`: the model's defaults for omitted parameters."""
        from kvq.engine import SamplingParams, StructuredOutput

        given = {name: value for name, value in asdict(self).items() if value is not None}
        grammar = {name: given.pop(name) for name in ("json_schema", "regex") if name in given}
        if grammar:
            given["structured"] = StructuredOutput(**grammar)
        return SamplingParams(**(given if defaults is None else defaults.fill(given, given)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _WatermarkOptions:
    watermark_key_file: str | None = path_option(
        "--watermark-key-file", "Mark the text with this secret key; see kvq detect-watermark.", type=TO_READ
    )
    watermark_scheme: str = option("green", "green or tournament, with parameters to change: green,delta=3.")

    def engine_options(self) -> dict[str, Any]:
        """Return options for `kvq.LLM`, or an empty dict if there is no key."""
        from kvq.watermark import parse_scheme, read_key

        parse_scheme(self.watermark_scheme)
        if self.watermark_key_file is None:
            return {}
        read_key(self.watermark_key_file)
        return {"watermark": "always", **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunOptions:
    speculation: str | None = option(None, SPECULATION)
    accept_divergence: bool = option(False, ACCEPT)
    generation_config: str = option("auto", GENERATION_CONFIG)


@click.command(name="generate", cls=SectionedCommand)
@kv_option("auto", many=False)
@model_options
@gathered(_SamplingOptions, "sampling")
@gathered(_WatermarkOptions, "watermark")
@gathered(_RunOptions, "options")
@click.argument("prompt")
def command(
    prompt: str,
    kv: list[str],
    model_options: ModelOptions,
    sampling: _SamplingOptions,
    watermark: _WatermarkOptions,
    options: _RunOptions,
) -> None:
    """Continue PROMPT, and stream the text to standard output. A single argument is the prompt; the model is
    then the embedded model unless --model names another.
    """
    from kvq.commands.shared.loading import check_for, load_to_serve
    from kvq.engine import LLM
    from kvq.engine.build import check_cache
    from kvq.engine.grammar.compiler import check_structured
    from kvq.engine.requests.request_options import prompt_tokens
    from kvq.engine.speculation.make import check_speculation
    from kvq.engine.speculation_config import parse_speculation
    from kvq.models.gguf.header import has_magic
    from kvq.models.run.prompts import check_length, longest_token
    from kvq.scheduler.fit import check_room

    is_file = isfile(prompt) and has_magic(Path(prompt))
    if is_file or isfile(join(prompt, "config.json")):
        what = "file" if is_file else "folder"
        raise ConfigError(f"{prompt} is a model's {what} and no prompt: kvq generate {prompt} PROMPT")
    params, marks = sampling.params(), watermark.engine_options()
    if params.structured is not None:
        check_structured(params.structured)
    checked = check_for(model_options, kv)
    known = checked.prepared
    check_cache(known)
    drafting = parse_speculation(options.speculation)
    check_speculation(drafting, known)
    check_length(prompt, known.max_context, longest_token(known.tokenizer))
    length = len(prompt_tokens(prompt, known.tokenizer, known.geometry.vocab_size))
    params = sampling.params(say_defaults(known.source, options.generation_config))
    room = check_room(length, params.max_tokens, known.max_context)
    model = load_to_serve(checked, kv[0], accept_divergence=options.accept_divergence)
    longest = length + min(room, params.max_tokens or params.most_tokens or room)
    with LLM(model, max_num_seqs=1, max_context=longest, speculation=drafting, **marks) as llm:
        pieces = llm.stream(prompt, params)
        shown = prompt
        for piece in pieces:
            stream(shown + piece.text)
            shown = ""
    echo()
