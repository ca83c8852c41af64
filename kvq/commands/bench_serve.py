"""`kvq bench serve`: a server under load over HTTP."""

import asyncio
import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click

from kvq.commands.options import OneNumber, gathered, kv_option
from kvq.commands.screen import echo
from kvq.errors import ConfigError
from kvq.extras import SERVER, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The load that is asked for, as the command line says it."""

    requests: int
    input_len: str
    output_len: str
    rate: str
    concurrency: int | None
    shared_prefix: float
    seed: int


@click.command(name="serve", context_settings={"ignore_unknown_options": True})
@kv_option("auto", many=True)
@click.option("--url", help="A server that runs already, such as http://127.0.0.1:8000.")
@click.option("--api-key-env", default="KVQ_API_KEY", show_default=True, help="Variable with its key.")
@click.option("--requests", default=64, show_default=True, type=click.IntRange(1, 1_000_000))
@click.option("--input-len", default="128", show_default=True, help="128, 16:512, or lognormal:MEDIAN:SIGMA.")
@click.option("--output-len", default="64", show_default=True, help="Tokens of outputs, likewise.")
@click.option("--rate", default="inf", show_default=True, help="Requests per second, with random gaps.")
@click.option(
    "--concurrency",
    type=OneNumber(1, 4096, "run the command once for each"),
    help="So many users at a time instead of --rate.",
)
@click.option(
    "--shared-prefix", default=0.0, show_default=True, type=click.FloatRange(0, 1), help="Of each prompt."
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--pin/--no-pin", default=True, show_default=True, help="HTTP on one core, engine on the others."
)
@click.option("--seed", default=0, show_default=True, help="Of lengths, arrivals and token ids.")
@click.option("--json", "json_path", type=click.Path(), help="Write the rows as JSON.")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
@gathered(Asked, "asked")
def serve(
    kv: list[str],
    url: str | None,
    api_key_env: str,
    repeats: int,
    pin: bool,
    json_path: str | None,
    serve_options: tuple[str, ...],
    asked: Asked,
) -> None:
    """Send random prompts over HTTP: throughput, latencies, and what was refused.

    Options that are not listed here, such as --model and --num-blocks, go to the `kvq serve` that is
    started, one for each KV format. Latencies are the client's: TTFT counts from when a request was due.
    """
    require("kvq bench serve", SERVER)
    from kvq.bench.serve import Plan, bench_serve, bench_url
    from kvq.commands.finished import FinishedRows
    from kvq.commands.progress import named_progress
    from kvq.commands.results import begin, result_of

    begin(json_path)
    if url is not None and serve_options:
        raise ConfigError(f"{serve_options[0]} is for a server that is started here; leave it out with --url")
    plan = Plan(make_load=_load_of(asked), users=asked.concurrency, repeats=repeats)
    words = asdict(asked)
    words = {"users": words.pop("concurrency"), **words}
    with FinishedRows(json_path, partial(result_of, facts={"load": words}), _print) as finished:
        with named_progress() as named:
            progress = partial(named, "serving")
            if url is None:
                named("starting servers", 0, None)
                work = bench_serve(kv, serve_options, plan, pin=pin, progress=progress, keep=finished.keep)
            else:
                key = os.environ.get(api_key_env, "none")
                work = bench_url(url, key, plan, progress=progress, keep=finished.keep)
            rows = asyncio.run(work)
        finished.end(rows)


def _load_of(asked: Asked) -> Any:
    from kvq.bench.engine_load import Load
    from kvq.capacity.draws import parse_lengths

    if asked.concurrency is not None and asked.rate != "inf":
        raise ConfigError("--rate and --concurrency both say when requests come; give one of them")
    try:
        per_second = float(asked.rate)
    except ValueError as error:
        raise ConfigError(f"--rate takes requests per second or inf, got {asked.rate!r}") from error
    lengths = parse_lengths(asked.input_len, "--input-len"), parse_lengths(asked.output_len, "--output-len")

    def make(vocab_size: int, max_context: int) -> Load:
        return Load(
            num_requests=asked.requests,
            input_lengths=lengths[0],
            output_lengths=lengths[1],
            vocab_size=vocab_size,
            max_context=max_context,
            rate=per_second,
            shared_prefix=asked.shared_prefix,
            seed=asked.seed,
        )

    return make


_COLUMNS = {
    "name": ("name", ""),
    "kv": ("kv", ""),
    "concurrency": ("at a time", "g"),
    "output_tokens_per_s": ("output tok/s", ",.1f"),
    "output_tokens_per_s_p10": ("p10", ",.1f"),
    "output_tokens_per_s_p90": ("p90", ",.1f"),
    "ttft_ms_p50": ("TTFT ms p50", ",.1f"),
    "ttft_ms_p99": ("p99", ",.1f"),
    "itl_ms_p50": ("ITL ms p50", ",.1f"),
    "itl_ms_p99": ("p99", ",.1f"),
    "complete": ("complete", ","),
    "refused": ("refused", ","),
    "refusal_ms_p99": ("in ms p99", ",.1f"),
    "broken": ("broken", ","),
}


def _print(result: dict[str, Any]) -> None:
    from kvq.commands.tables import print_columns

    rows = result["rows"]
    print_columns(rows, _COLUMNS, width=180)
    equal = sum(row["check_equal"] for row in rows)
    echo(f"checked: for {equal} of {len(rows)} a request gave the same text under load as alone")
