"""`kvq cache`: what the prefix cache shares between prompts, and why not more."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvq import strict_json
from kvq.commands.shared.declare import gathered, option, path_option
from kvq.commands.shared.param_types import BLOCK_SIZES, FILE, MODEL
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError, ModelError, RequestError
from kvq.fileio import write_text
from kvq.layout import BLOCK_SIZE

if TYPE_CHECKING:
    from kvq.blockmgr import PrefixMiss
    from kvq.models.run.prompts import PromptEncoder

_AROUND = 8  # tokens shown before and after the first that differs
_WORDS = {
    None: "all of it that can be reused is cached after {a}",
    "new_text": "{b} is longer: from there on, nothing is cached after {a}",
    "changed_text": "the text has changed",
    "template": "what the chat template writes has changed, such as a date or tools",
    "salt": "the two have different cache salts, so they share nothing",
    "no_snapshot": "the tokens are cached, but no recurrent state is kept there",
}


@click.group(name="cache")
def command() -> None:
    """Explain what the prefix cache shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExplainOptions:
    model: str = option("tiny", "Folder, GGUF file, hub name, or 'tiny'.", names="--model -m", type=MODEL)
    block_size: int = option(BLOCK_SIZE, "Tokens per block.", type=BLOCK_SIZES)
    json_path: str | None = path_option("--json", "Write the findings as JSON.")


class _Prompt(NamedTuple):
    name: str
    tokens: list[int]
    texts: list[tuple[int, int]]  # of a chat: token ranges of its messages' texts
    salt: str | None


@command.command(name="explain")
@click.argument("first", metavar="A.json", type=FILE)
@click.argument("second", metavar="B.json", type=FILE)
@gathered(_ExplainOptions, "options")
def explain(first: Path, second: Path, options: _ExplainOptions) -> None:
    """Show how much of the prompt in B.json is cached after the one in A.json, and why not more.

    The files have a chat request's messages, and possibly its tools and chat_template_kwargs, or a prompt,
    which is a text or token ids. Both may have a cache_salt. No weights are read.
    """
    from kvq.models.describe.resolve import resolve_model
    from kvq.models.loading.tokenizer import load_without_torch
    from kvq.models.run.prompts import PromptEncoder, num_common

    folder = resolve_model(options.model, weights=False).folder
    has_states = _has_states(folder)
    encoder = PromptEncoder(load_without_torch(folder))
    a, b = (_read(path, encoder) for path in (first, second))
    reused, miss = _ask(a, b, options.block_size, has_states=has_states)
    at = num_common(a.tokens, b.tokens)
    found = {
        "tokens": [len(a.tokens), len(b.tokens)],
        "common_tokens": at,
        "block_size": options.block_size,
        "shared_blocks": reused // options.block_size,
        "reused_tokens": reused,
        "miss": miss and miss.facts(),
    }
    echo(f"{a.name}: {len(a.tokens):,} tokens; {b.name}: {len(b.tokens):,}; the first {at:,} are the same")
    echo(f"{reused:,} are reused: {reused // options.block_size:,} blocks of {options.block_size}")
    if a.tokens == b.tokens and (miss is None or miss.cause == "new_text"):
        echo(f"the prompts are equal; the last {len(b.tokens) - reused:,} tokens are computed again")
    else:
        echo(_in_words(miss, a.name, b.name))
    for prompt in (a, b):
        shown = prompt.tokens[max(0, at - _AROUND) : at], prompt.tokens[at : at + _AROUND]
        echo(f"  {prompt.name}: {' | '.join(repr(encoder.decode(part)) for part in shown)}")
    if options.json_path is not None:
        write_text(options.json_path, json.dumps(found, indent=1) + "\n")


def _read(path: Path, encoder: "PromptEncoder") -> _Prompt:
    """Return the prompt of a file; raise RequestError if it has none."""
    try:
        given = strict_json.read(path)
        prompt, messages, salt = (given.get(name) for name in ("prompt", "messages", "cache_salt"))
        if messages is not None:
            turns = [{**turn, "role": turn["role"]} for turn in messages]
            tokens, texts = encoder.read_chat(turns, _template_options(given))
        else:
            tokens = encoder.encode(prompt) if isinstance(prompt, str) else list(map(int, prompt))
            texts = []
        if not isinstance(salt, str | None) or not all(0 <= token < 1 << 32 for token in tokens):
            raise ValueError
    except RequestError:  # the template's
        raise
    except json.JSONDecodeError as error:
        raise RequestError(f"{path} is no JSON: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(
            f"{path} must be an object with messages, each an object with role and content, or with a "
            f"prompt, a text or a list of token ids; it may also have tools, a list, chat_template_kwargs, "
            f"an object, and cache_salt, a text"
        ) from error
    if not tokens:
        raise RequestError(f"the prompt in {path} is empty; give some text")
    return _Prompt(path.name, tokens, texts, salt)


def _template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    tools = None if given.get("tool_choice") == "none" else given.get("tools")
    own = {"add_generation_prompt": given.get("add_generation_prompt", True), "tools": tools or None}
    return (given.get("chat_template_kwargs") or {}) | own


def _has_states(folder: Path) -> bool:
    """Return True if the model has recurrent layers; models that kvq can't run count as having none."""
    from kvq.geometry import parse_geometry
    from kvq.models.describe.text_part import read_config

    config = read_config(folder)
    try:
        return bool(parse_geometry(config).states)
    except (ConfigError, ModelError):  # not a listed family, so torch is needed to tell
        from kvq.models.observe.support import check_supported
    with suppress(ConfigError, ModelError):
        return bool(check_supported(config, max_context=1, folder=folder).states)
    return False


def _ask(a: _Prompt, b: _Prompt, block_size: int, *, has_states: bool) -> "tuple[int, PrefixMiss | None]":
    """Return how many tokens of `b` an engine would reuse after `a`, and why not more."""
    from kvq.blockmgr import BlockManager

    num_blocks = 4 + sum(len(prompt.tokens) for prompt in (a, b)) // block_size
    rules: dict[str, Any] = {"windows": [None, 2], "state_group": 1} if has_states else {}
    manager = BlockManager(num_blocks=[num_blocks] * (1 + has_states), block_size=block_size, **rules)
    prompts = [manager.prompt(one.tokens, cache_salt=one.salt) for one in (a, b)]
    for prompt in prompts:
        sequence = manager.start(prompt)
        reused, miss = sequence.length, manager.misses.explain(prompt, sequence)
        manager.extend([(sequence, len(prompt.tokens) - reused)])
        manager.commit(sequence)
        manager.free(sequence)
    return reused, miss and miss.placed(b.texts)


def _in_words(miss: "PrefixMiss | None", a: str, b: str) -> str:
    if miss is None:
        return _WORDS[None].format(a=a, b=b)
    place = f"token {miss.token:,}"
    if miss.part == "text":
        place += f", in the text of message {miss.message}"
    elif miss.part:
        following = f"message {miss.message}" if miss.message else "the answer"
        place += f", in what the template writes before the text of {following}"
    return f"{miss.cause}: {place}: {_WORDS[miss.cause].format(a=a, b=b)}"
