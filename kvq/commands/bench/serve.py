"""`kvq bench serve`: servers under load, measured over HTTP."""

import asyncio
import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click

from kvq.commands.bench.options import TrafficOptions
from kvq.commands.shared.declare import gathered, option
from kvq.commands.shared.options import json_option, kv_option
from kvq.commands.shared.progress import named_progress
from kvq.commands.shared.results import FinishedRows, begin, result_of
from kvq.commands.shared.terminal import echo, print_columns
from kvq.errors import ConfigError
from kvq.evals.report.page import columns_of
from kvq.evals.watch import Watch
from kvq.extras import SERVER, require


class _OneConcurrency(click.IntRange):
    """Number of concurrent users; unlike `kvq bench engine`, this command takes only one number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "," in value:
            self.fail(f"one number is taken here, got {value!r}; run the command once for each.", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ServeOptions:
    serve_options: tuple[str, ...]
    url: str | None = option(None, "A server that runs already, such as http://127.0.0.1:8000.")
    api_key_env: str = option("KVQ_API_KEY", "Environment variable with its key.")
    requests: int = option(64, type=click.IntRange(1, 1_000_000))
    concurrency: int | None = option(
        None, "Users at a time instead of --rate.", type=_OneConcurrency(1, 4096)
    )
    repeats: int = option(3, type=click.IntRange(1, 1000))
    pin: bool = option(True, "Pin HTTP to one core, and the engine to the others.")


@click.command(name="serve", context_settings={"ignore_unknown_options": True})
@kv_option("auto", many=True)
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
@gathered(_ServeOptions, "options")
@gathered(TrafficOptions, "traffic")
@json_option
def serve(kv: list[str], options: _ServeOptions, traffic: TrafficOptions, json_path: str | None) -> None:
    """Send random prompts over HTTP, and measure throughput, latencies and refusals.

    Options that are not listed here, such as --model and --num-blocks, are passed to `kvq serve`, which is
    started for each KV format. Latencies are measured by the client; TTFT starts when a request is due.
    """
    require("kvq bench serve", SERVER)
    from kvq.bench.serve.serve import bench_serve, bench_url, measure_servers

    begin(json_path)
    url, of_servers = options.url, options.serve_options
    if url is not None and of_servers:
        raise ConfigError(f"{of_servers[0]} is for a server that is started here; leave it out with --url")
    make = traffic.make(options.requests, options.concurrency)
    measure = partial(measure_servers, make_load=make, users=options.concurrency, repeats=options.repeats)
    load = asdict(traffic) | {"requests": options.requests, "users": options.concurrency}
    with FinishedRows(json_path, partial(result_of, facts={"load": load}), _print) as finished:
        with named_progress() as named:
            measure = partial(measure, watch=Watch(partial(named, "serving"), finished.keep))
            if url is None:
                named("starting servers", 0, None)
                work = bench_serve(kv, of_servers, measure, pin=options.pin)
            else:
                work = bench_url(url, os.environ.get(options.api_key_env, "none"), measure)
            rows = asyncio.run(work)
        finished.end(rows)


def _print(result: dict[str, Any]) -> None:
    rows = result["rows"]
    print_columns(rows, columns_of("bench serve"), width=180)
    equal = sum(row["check_equal"] for row in rows)
    echo(f"checked: for {equal} of {len(rows)} a request gave the same text under load as alone")
