"""`kvq replay`: requests answered again, and whether their answers have the same bits."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import SectionedCommand
from kvq.commands.shared.param_types import FILE
from kvq.commands.shared.progress import named_progress
from kvq.commands.shared.terminal import echo
from kvq.commands.use.engine_options import service_options
from kvq.errors import ConfigError
from kvq.extras import SERVER, require
from kvq.printable import one_line

if TYPE_CHECKING:
    from kvq.engine.requests.outputs import ExactReceipt
    from kvq.server.admission.config import ServerConfig

_SHOWN = 20  # maximum number of differing requests shown
_DIGITS = 8  # of a token in a receipt's `tokens` and `prompt`
_MAY_CHANGE = ("id", "exact_receipts", "prompt_tokens_details", "completion_tokens_details")
_PARTS = {  # of a receipt
    "model": "the model's weights, config or tokenizer differ",
    "recipe": "the KV formats differ",
    "program": "it was computed by {old.program}, and now by {new.program}",
    "request": "the request differs; without a seed, several prompts of one request can't be replayed",
}

# An answer of a batch file: its receipts, and the rest without what changes from run to run
_Answer = tuple[list["ExactReceipt"], list[Any]]


@click.command(name="replay", cls=SectionedCommand)
@service_options
@click.argument("source", metavar="IN.jsonl", type=FILE)
@click.argument("target", metavar="OUT.jsonl", type=FILE)
def command(service: Callable[[], dict[str, Any]], source: Path, target: Path) -> None:
    """Answer the requests of IN.jsonl again, and compare with OUT.jsonl, which kvq run-batch --exact wrote.

    For every answer with a receipt, kvq says whether it comes out alike, bit for bit, and otherwise what
    differs: weights, formats, program, or the first token. Answers of kvq serve --exact can be replayed, too,
    as lines {"custom_id": "1", "response": {"body": ANSWER}}. The exit code is 1 if any answer differs.
    """
    require("kvq replay", SERVER)
    from kvq.server.admission.config import ServerConfig

    given = service()
    given["engine"] |= {"exact": True}
    every = _answers(target)
    known = {name: answer for name, answer in every.items() if answer[0]}
    if not known:
        raise ConfigError(
            f"{target} has no receipts of exact answers; write some: kvq run-batch --exact IN.jsonl OUT.jsonl"
        )
    if without := len(every) - len(known):
        echo(f"note      {without:,} answers without a receipt are not replayed")
    found = _again(source, known, ServerConfig(**given))
    differing = {}
    for name, answer in known.items():
        if reason := _difference(answer, found.get(name)):
            differing[name] = reason
    for name, reason in list(differing.items())[:_SHOWN]:
        echo(f"{one_line(name)}: {reason}")
    if len(differing) > _SHOWN:
        echo(f"... and {len(differing) - _SHOWN:,} more")
    echo(
        f"replayed  {len(known):,} answers: {len(known) - len(differing):,} alike, {len(differing):,} differ"
    )
    sys.exit(1 if differing else 0)


def _again(source: Path, known: dict[str, _Answer], serving: "ServerConfig") -> dict[str, _Answer]:
    """Return the answers that the known requests of a batch get now."""
    from kvq.server.batch.run import BatchConfig, run_batch

    with tempfile.TemporaryDirectory(prefix="kvq-replay-") as folder, named_progress() as progress:
        requests, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        requests.write_text("".join(_with_seeds(source, known)), encoding="utf-8")
        most = 2 * serving.engine["max_num_seqs"]
        progress("answering again", 0, None)
        summary = run_batch(
            BatchConfig(source=requests, target=target, max_in_flight=most, serving=serving),
            lambda done, total: progress("answering again", done, total),
        )
        if not summary.is_complete:
            raise click.Abort
        return _answers(target)


def _answers(path: Path) -> dict[str, _Answer]:
    """Return the answers of a batch's results, by custom_id, those without receipts too.

    Raises:
        ConfigError: a line is damaged, or a second answer to the same request.
    """
    from kvq.engine.requests.outputs import ExactReceipt

    found: dict[str, _Answer] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else {}
            body = (row.get("response") or {}).get("body") or {}
            if "choices" not in body:  # an empty line, or a request that failed
                continue
            receipts = [ExactReceipt(**receipt) for receipt in body["usage"].get("exact_receipts", [])]
            own = receipts, _without_ids([body["choices"], body["usage"]])
            name = str(row["custom_id"])
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            what = f"{path}, line {number} is no result of kvq run-batch"
            raise ConfigError(f"{what}: {error!r:.80}") from error
        if found.setdefault(name, own) is not own:
            raise ConfigError(f"{path}, line {number}: {name!r:.80} was answered before")
    return found


def _without_ids(value: Any) -> Any:
    """Return JSON without what may change: ids of tool calls, receipts, and how many tokens were cached."""
    if isinstance(value, list):
        return [_without_ids(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_ids(item) for name, item in value.items() if name not in _MAY_CHANGE}
    return value


def _with_seeds(source: Path, known: dict[str, _Answer]) -> Iterator[str]:
    """Yield the requests that have answers, with the seeds that these used."""
    from kvq.server.batch.lines import read_lines

    for line in read_lines(source):
        answer = known.get(line.custom_id or "")
        if answer is None:
            continue
        first, several = answer[0][0], len(answer[0]) > 1  # several prompts have several seeds
        limit = {} if "max_completion_tokens" in line.body else {"max_tokens": first.max_tokens}
        limit |= {} if several else {"seed": first.seed}
        body = limit | {name: value for name, value in line.body.items() if value is not None}
        yield json.dumps({"custom_id": line.custom_id, "url": line.url, "body": body}) + "\n"


def _difference(known: _Answer, found: _Answer | None) -> str:
    """Return what differs between an answer and its replay, or an empty text."""
    if found is None:
        return "no answer this time, or it is not in the input"
    for old, new in zip(known[0], found[0], strict=False):
        for name, what in _PARTS.items():
            if getattr(old, name) != getattr(new, name):
                return what.format(old=old, new=new)
        for i, (own, other) in enumerate(zip(old.tokens, new.tokens, strict=False)):
            if (at := _first(own, other)) is not None:
                return f"result {i} differs from token {at} on"
        if (at := _first(old.prompt, new.prompt)) is not None:
            return f"log-probabilities of the prompt differ from entry {at} on"
        if old.kv != new.kv:
            return "the stored K and V differ, although all tokens are alike"
    if known[0] != found[0]:
        return "the receipt is another one"
    return "" if known == found else "texts or numbers of the answer differ"


def _first(own: str, other: str) -> int | None:
    """Return the number of the first token at which two receipts differ, or None."""
    length = max(len(own), len(other))
    return next((i // _DIGITS for i in range(length) if own[i : i + 1] != other[i : i + 1]), None)
