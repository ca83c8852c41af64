"""`kvq run-batch`: a file of requests, answered into another."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvq.commands.options import ModelOptions, kv_option, model_options
from kvq.commands.screen import echo
from kvq.commands.served import EngineOptions, engine_of, engine_options, strict_option, tool_call_option
from kvq.extras import SERVER, require

if TYPE_CHECKING:
    from kvq.models.resolve import ModelSource
    from kvq.server.batch.run import Summary


class _Stopped(Exception):
    """A signal ended the run early."""


@click.command(name="run-batch")
@click.argument("source", metavar="IN.jsonl", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT.jsonl", type=click.Path(path_type=Path))
@kv_option("auto", many=False)
@model_options
@click.option("--served-model-name", help="The model's name in requests; default: the last part of its path.")
@click.option(
    "--max-in-flight",
    type=click.IntRange(1, 65536),
    help="Lines that are held and answered at a time.  [default: twice --max-num-seqs]",
)
@click.option(
    "--retry-failed", is_flag=True, help="Also run again what failed by the engine or for too much load."
)
@tool_call_option
@strict_option
@engine_options
def command(
    source: Path,
    target: Path,
    kv: list[str],
    model_options: ModelOptions,
    served_model_name: str | None,
    tool_call_parser: str,
    strict_requests: bool,
    max_in_flight: int | None,
    retry_failed: bool,
    engine_options: EngineOptions,
) -> None:
    """Answer the requests of IN.jsonl, in OpenAI's batch format, into OUT.jsonl.

    Results are in the order in which they were ready. Run the same command again to go on after an
    interruption: what has a result in OUT.jsonl is not run again. Exit code 1 if a line has no answer.
    """
    require("kvq run-batch", SERVER)
    from kvq.commands.loading import say_model
    from kvq.commands.progress import named_progress
    from kvq.server.batch.run import BatchConfig, run_batch

    config = BatchConfig(
        source=source,
        target=target,
        model=model_options.model,
        kv=kv[0],
        served_model_name=served_model_name,
        tool_call_parser=tool_call_parser,
        strict_requests=strict_requests,
        max_in_flight=max_in_flight or 2 * engine_options.max_num_seqs,
        retry_failed=retry_failed,
        engine=engine_of(model_options, engine_options),
    )
    with suppress(_Stopped), named_progress() as progress:
        progress("starting the engine", 0, None)

        def on_model(source: "ModelSource", digest: str) -> None:
            say_model(source, digest)
            progress("answering", 0, None)

        summary = run_batch(config, partial(progress, "answering"), on_model)
        if not summary.is_complete:
            raise _Stopped  # nothing says "done" then
    _print(summary, target, is_strict=strict_requests)
    if not summary.is_complete:
        echo("kvq: stopped; run the same command again to go on", err=True)
        raise click.Abort
    sys.exit(1 if summary.num_failed else 0)


def _print(summary: "Summary", target: Path, *, is_strict: bool) -> None:
    rate = summary.generated_tokens / summary.seconds if summary.seconds else 0.0
    echo(f"requests  {summary.num_new:,} answered now, {summary.num_skipped:,} before")
    echo(f"failed    {summary.num_failed:,} of all in {target}")
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
