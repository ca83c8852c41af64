"""`kvq cost`: cost of GPUs rented by the hour, compared with an API billed by the token."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvq.capacity.plan import gpus
from kvq.commands.capacity.sizing import PriceOptions, gpu_file_option, gpus_of
from kvq.commands.shared.declare import gathered, option
from kvq.commands.shared.options import json_option
from kvq.commands.shared.param_types import AT_LEAST_0, AT_LEAST_1, GPU, SHARE, TOKENS
from kvq.commands.shared.results import write_rows
from kvq.commands.shared.terminal import console, text_table
from kvq.errors import ConfigError
from kvq.sizes import dollars


@dataclass(frozen=True, kw_only=True, slots=True)
class _CostOptions:
    gpu: str | None = option(None, "A name of `kvq gpus`, for its price.", type=GPU)
    usd_per_hour: float | None = option(None, "$ an hour for one GPU instead of --gpu's.", type=AT_LEAST_0)
    num_gpus: int = option(1, "Number of GPUs.", type=AT_LEAST_1)
    tokens_per_s: float | None = option(
        None, "Tokens per second that all GPUs together generate; see kvq plan.", type=AT_LEAST_0
    )
    utilization: float = option(1.0, "Share of the time in which the GPUs are busy.", type=SHARE)
    operations_usd: float = option(0.0, "$ a month for operating the GPUs.", type=AT_LEAST_0)
    prompt: int = option(500, "Prompt tokens of a request.", type=TOKENS)
    output: int = option(200, "Output tokens of a request.", type=TOKENS)
    requests: float | None = option(None, "Requests a month, to compare both.", type=AT_LEAST_0)


@click.command(name="cost")
@gathered(_CostOptions, "options")
@gathered(PriceOptions, "api")
@gpu_file_option
@json_option
def command(options: _CostOptions, api: PriceOptions, gpu_file: Path | None, json_path: str | None) -> None:
    """Compare the price of tokens on your own GPUs and from an API, and find the break-even point."""
    prices = api.prices()
    row = _numbers(options, prices, gpu_file)
    console().print(text_table(("", "", ""), _lines(row, options, prices), ("",), no_wrap=False))
    write_rows([row], json_path)


def _numbers(options: _CostOptions, api: gpus.Prices | None, gpu_file: Path | None) -> dict[str, Any]:
    own = _own(options, gpu_file)
    if not own and api is None:
        raise ConfigError(
            "give --gpu (or --usd-per-hour) with --tokens-per-s, --api-input with --api-output, or both"
        )
    row = dict(own)
    if api is not None:
        each = row["api_usd_per_request"] = api.request_usd(options.prompt, options.output)
        if options.requests is not None:
            row["api_usd_per_month"] = each * options.requests
        if own:
            row["break_even_requests"] = gpus.break_even_requests(row["usd_per_month"], each)
    return row


def _own(options: _CostOptions, gpu_file: Path | None) -> dict[str, Any]:
    """Return the cost of running on one's own GPUs, or an empty dict if no GPU is specified."""
    if options.gpu is None and options.usd_per_hour is None:
        return {}
    if options.tokens_per_s is None:
        raise ConfigError("--tokens-per-s is needed: kvq plan estimates it, kvq bench measures it")
    hourly = options.usd_per_hour
    if hourly is None:
        hourly = gpus.find_gpu(options.gpu or "", gpus_of(gpu_file)).usd_per_hour
    used, together = options.utilization, hourly * options.num_gpus
    million = gpus.usd_per_million(together, options.tokens_per_s, utilization=used)
    month = gpus.monthly_usd(hourly, gpus=options.num_gpus, operations_usd=options.operations_usd)
    served = gpus.requests_a_month(options.tokens_per_s / options.output, utilization=used)
    return {
        "usd_per_hour": together,
        "usd_per_million_tokens": million,
        "tokens_per_usd": 1e6 / million,
        "requests_per_usd": 1e6 / million / options.output,
        "usd_per_month": month,
        "requests_per_month": served,
        "usd_per_million_tokens_with_operations": 1e6 * month / (served * options.output),
    }


def _lines(
    row: dict[str, Any], options: _CostOptions, api: gpus.Prices | None
) -> Iterator[tuple[str, str, str]]:
    if "usd_per_hour" in row:
        speed = f"{options.tokens_per_s:,.0f} tokens/s x {options.utilization:.0%} x 3,600 s"
        million, operated = row["usd_per_million_tokens"], row["usd_per_million_tokens_with_operations"]
        month = f"{row['usd_per_month']:,.0f}"
        yield "$ a million tokens", dollars(million), f"${row['usd_per_hour']:,.2f} / ({speed})"
        yield "with operations", dollars(operated), f"${month} a month / tokens of a month"
        yield "tokens for $1", f"{row['tokens_per_usd']:,.0f}", ""
        yield "requests for $1", f"{row['requests_per_usd']:,.0f}", f"of {options.output} generated tokens"
        yield "$ a month", month, f"720 h, and ${options.operations_usd:,.0f} of operations"
        yield "requests a month", f"{row['requests_per_month']:,.0f}", "at that speed and utilization"
    if api is not None:
        formula = f"{options.prompt} tokens x ${api.input:g} + {options.output} x ${api.output:g}"
        yield "$ a request, API", f"{row['api_usd_per_request']:.4g}", f"{formula}, a million"
    if "api_usd_per_month" in row:
        yield "$ a month, API", f"{row['api_usd_per_month']:,.0f}", f"{options.requests:,.0f} requests"
    if "break_even_requests" in row:
        yield "break-even, requests a month", f"{row['break_even_requests']:,.0f}", _verdict(row, options)


def _verdict(row: dict[str, Any], options: _CostOptions) -> str:
    served, even = row["requests_per_month"], row["break_even_requests"]
    if options.requests is not None and options.requests > served:
        more = math.ceil(options.requests / served)
        return f"these GPUs serve fewer than {options.requests:,.0f} a month; take {more:,} times as many"
    if even > served:
        return "more than these GPUs can serve: the API is cheaper"
    if options.requests is None:
        return "above that, one's own GPUs are cheaper"
    return "one's own GPUs are cheaper" if options.requests > even else "the API is cheaper"
