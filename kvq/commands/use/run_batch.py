"""`kvq run-batch`: results for a file of requests, written to another file."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.shared.declare import SectionedCommand, gathered, option
from kvq.commands.shared.param_types import FILE, PATH
from kvq.commands.shared.progress import named_progress
from kvq.commands.shared.terminal import echo, say_defaults, say_model
from kvq.commands.use.engine_options import service_options
from kvq.extras import SERVER, require
from kvq.printable import one_line

if TYPE_CHECKING:
    from kvq.models.describe.resolve import ModelSource
    from kvq.server.batch.run import Summary

_REASONS = 3  # maximum number of failure reasons shown


class _Stopped(Exception):
    """Error: a signal ended the run early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _BatchOptions:
    source: Path
    target: Path
    max_in_flight: int | None = option(
        None,
        "Lines that are read and answered at a time.  [default: twice --max-num-seqs]",
        type=click.IntRange(1, 65536),
    )
    retry_failed: bool = option(False, "Also repeat requests that failed by the engine or too much load.")


@click.command(name="run-batch", cls=SectionedCommand)
@service_options
@gathered(_BatchOptions, "options")
@click.argument("source", metavar="IN.jsonl", type=FILE)
@click.argument("target", metavar="OUT.jsonl", type=PATH)
def command(service: Callable[[], dict[str, Any]], options: _BatchOptions) -> None:
    """Answer the requests in IN.jsonl, in OpenAI's batch format, and write the results to OUT.jsonl.

    Results are written in the order in which they complete. After an interruption, run the same command again
    to continue; requests with a result in OUT.jsonl are not repeated. The exit code is 1 if any request
    failed.
    """
    require("kvq run-batch", SERVER)
    from kvq.server.admission.config import ServerConfig
    from kvq.server.batch.run import BatchConfig, run_batch

    serving = ServerConfig(**service())
    config = BatchConfig(
        source=options.source,
        target=options.target,
        max_in_flight=options.max_in_flight or 2 * serving.engine["max_num_seqs"],
        retry_failed=options.retry_failed,
        serving=serving,
    )
    with suppress(_Stopped), named_progress() as progress:
        progress("starting the engine", 0, None)

        def on_model(source: "ModelSource", digest: str) -> None:
            say_model(source, digest)
            say_defaults(source, serving.generation_config)
            progress("answering", 0, None)

        summary = run_batch(config, partial(progress, "answering"), on_model)
        if not summary.is_complete:
            raise _Stopped  # prevents the progress from printing "done"
    _print(summary, options.target, is_strict=serving.strict_requests)
    if not summary.is_complete:
        echo("kvq: stopped; run the same command again to continue", err=True)
        raise click.Abort
    sys.exit(1 if summary.num_failed else 0)


def _print(summary: "Summary", target: Path, *, is_strict: bool) -> None:
    rate = summary.generated_tokens / summary.seconds if summary.seconds else 0.0
    echo(f"requests  {summary.num_new:,} answered now, {summary.num_skipped:,} before")
    echo(f"failed    {summary.num_failed:,} of all in {target}")
    for reason, count in summary.reasons.most_common(_REASONS):
        echo(f"          {count:,} x {one_line(reason)}")
    if summary.num_failed > summary.reasons.total() and not summary.num_new:
        echo(
            f"note      earlier failures are not repeated; name another file than {target} to try them again"
        )
    echo(
        f"tokens    {summary.prompt_tokens:,} of prompts ({summary.cached_tokens:,} cached), "
        f"{summary.generated_tokens:,} generated, {rate:,.1f} per second in {summary.seconds:,.1f} s"
    )
    if summary.num_ignoring:
        hint = "" if is_strict else "; --strict-requests refuses unknown ones"
        names = ", ".join(summary.ignored)
        echo(f"ignored   fields in {summary.num_ignoring:,} of these: {names}{hint}")
    if summary.num_strangers:
        echo(f"note      {target} also has results of {summary.num_strangers:,} custom_ids not in the input")
