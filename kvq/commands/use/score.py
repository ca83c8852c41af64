"""`kvq score`: log-probabilities of given completions, with the bits of the engine that generates."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import SectionedCommand, gathered, option
from kvq.commands.shared.options import ACCEPT, ModelOptions, kv_option, model_options
from kvq.commands.shared.param_types import FILE, PATH
from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError
from kvq.fileio import check_writable, write_text

if TYPE_CHECKING:
    from kvq.engine import RequestOutput

_FIELDS = ("prompt", "completion")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScoreOptions:
    max_num_seqs: int = option(32, "Rollouts at a time.", type=click.IntRange(1, 1 << 16))
    accept_divergence: bool = option(False, ACCEPT)


@click.command(name="score", cls=SectionedCommand)
@kv_option("auto", many=False)
@model_options
@gathered(_ScoreOptions, "options")
@click.argument("source", metavar="IN.jsonl", type=FILE)
@click.argument("target", metavar="OUT.jsonl", type=PATH)
def command(
    source: Path, target: Path, kv: list[str], model_options: ModelOptions, options: _ScoreOptions
) -> None:
    """Write the log-probabilities of the completions in IN.jsonl to OUT.jsonl, one line per line.

    Lines have a prompt and a completion, each a text or token ids, and possibly an id and the logprobs of
    whoever generated it. The model is loaded with --exact: log-probabilities have the bits of an engine with
    --exact that generates these tokens. If logprobs are given, each line also says where they first differ,
    and the importance ratios' greatest distance from 1.
    """
    from kvq.commands.shared.loading import check_for, load_to_serve
    from kvq.engine import LLM

    check_writable(target)
    rows = list(_rows(source))
    if not rows:
        raise ConfigError(f"{source} has no lines; give one JSON object per completion")
    checked = check_for(replace(model_options, exact=True), kv)
    model = load_to_serve(checked, kv[0], accept_divergence=options.accept_divergence)
    with LLM(model, max_num_seqs=options.max_num_seqs) as llm, progress_bar("scoring") as progress:
        prompts, completions = ([row[name] for row in rows] for name in _FIELDS)
        found = llm.score(prompts, completions, progress=progress)
    lines = [_scored(row, output) for row, output in zip(rows, found, strict=True)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_text(target, text)
    tokens = sum(len(line["token_ids"]) for line in lines)
    echo(f"scored    {len(lines):,} completions, {tokens:,} tokens, into {target}")
    if compared := [line for line in lines if "first_difference" in line]:
        differing = sum(line["first_difference"] is not None for line in compared)
        echo(f"compared  {len(compared):,} with given logprobs; {differing:,} differ")


def _scored(row: dict[str, Any], output: "RequestOutput") -> dict[str, Any]:
    """Return the line that answers `row`."""
    if output.error is not None:
        raise output.error
    (result,), receipt = output.outputs, output.receipt.exact
    assert result.logprobs is not None, "requested"
    assert receipt is not None, "the engine is exact"
    line = {"id": row["id"]} if "id" in row else {}
    line |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": result.token_ids}
    line |= {"logprobs": [entry.logprob for entry in result.logprobs], "receipt": asdict(receipt)}
    return line | _compared(row.get("logprobs"), line["logprobs"])


def _rows(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines' objects.

    Raises:
        ConfigError: a line is no object, or lacks a field; the message names the line.
    """
    from kvq.strict_json import loads

    for number, line in enumerate(source.read_bytes().splitlines(), 1):
        row: Any = None
        with suppress(ValueError):
            row = loads(line or b"null")
        where = f"{source}, line {number}"
        if line.strip() and (not isinstance(row, dict) or not all(row.get(name) for name in _FIELDS)):
            raise ConfigError(
                f"{where}: give a JSON object with a prompt and a completion, each a text or token ids, got "
                f"{line.decode(errors='replace').strip():.80}"
            )
        if isinstance(row, dict):
            _check_logprobs(row.get("logprobs"), row["completion"], where)
            yield row


def _check_logprobs(given: Any, tokens: Any, where: str) -> None:
    numbers = isinstance(given, list) and all(type(x) in (int, float) for x in given)
    if given is not None and not (numbers and isinstance(tokens, list) and len(given) == len(tokens)):
        raise ConfigError(
            f"{where}: logprobs are a number for each token of a completion in token ids, got {given!r:.80} "
            f"for {tokens!r:.80}"
        )


def _compared(given: list[float] | None, found: list[float]) -> dict[str, Any]:
    """Return where given log-probabilities first differ, and how far importance ratios are from 1 at most."""
    if given is None:
        return {}
    first = next((i for i, (x, y) in enumerate(zip(given, found, strict=True)) if x != y), None)
    ratios = [exp(min(y - x, 700.0)) for x, y in zip(given, found, strict=True)]
    return {"first_difference": first, "ratio_error": max((abs(x - 1) for x in ratios), default=0.0)}
