"""`kvq plan`: how many users fit on which GPU, term by term."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import AT_LEAST_1, FILE, TOKENS, Finite, Size, gathered, kv_option, option, picked
from kvq.commands.plan_serve import serve_command, users_of_a_shorter_context
from kvq.commands.plan_vllm import vllm_engine, vllm_figures, vllm_remarks, vllm_server
from kvq.commands.results import result_of, write_rows
from kvq.commands.screen import echo
from kvq.commands.sizing import SizingOptions, sizing_options, target_options
from kvq.errors import ConfigError
from kvq.sizes import decimal, parse_tokens
from kvq.sizing.pools import MAX_NUM_SEQS

if TYPE_CHECKING:
    from kvq.capacity.lengths import Demand, Length
    from kvq.capacity.plan.engine import Engine
    from kvq.capacity.plan.gpus import Gpu
    from kvq.capacity.plan.plan import CapacityPlan
    from kvq.capacity.plan.target import Target
    from kvq.capacity.plan.vllm import VllmEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """How long requests are, how many come, and whether this machine is measured instead."""

    context: int | None = option(None, "Tokens of each request when it ends.", type=TOKENS)
    output: int | None = option(None, "Of these, generated.  [default: an eighth]", type=TOKENS)
    lognormal: str | None = option(None, "MEDIAN,SIGMA of the tokens of requests, instead of --context.")
    trace: Path | None = option(
        None,
        "JSON lines with prompt_tokens and output_tokens, or CSV with TIMESTAMP, ContextTokens and "
        "GeneratedTokens, instead of --context.",
        type=FILE,
    )
    prefix_share: float = option(0.0, "Of the prompts, what all requests share.")
    slot: int | None = option(
        None,
        "Tokens that an engine without blocks reserves for each request.  [default: with --context the "
        "longest that the server takes, else the longest request]",
        type=TOKENS,
    )
    users: int | None = option(None, "Tells how many GPUs so many users need.", type=AT_LEAST_1)
    active: float = option(
        1.0, "Share of --users with a request at any time.", type=Finite(0, 1, min_open=True)
    )
    rate: float | None = option(
        None, "Requests a second; tells utilization, and how many are there at once.", type=Finite()
    )
    engine: str = option(
        "kvq",
        "What serves: kvq, or vllm with kvq's plug-in; bf16, fp16 and fp32 are vLLM's own cache. Options "
        "that aren't given are vLLM's then: --block-size 16, --gpu-memory-utilization 0.92 (of the whole "
        "GPU), --max-num-batched-tokens as it is for that GPU.",
        type=click.Choice(["kvq", "vllm"]),
    )
    verify: bool = option(False, "Start engines on this machine, and compare their memory.")
    kv_memory: str | None = option(
        None,
        "With --verify: their pools, such as 512MiB; with --engine vllm: its --kv-cache-memory-bytes.  "
        "[default: as the engine's]",
        type=Size(),
    )
    weights_gb: float | None = option(None, "GB of all weights, instead of counting them.", type=Finite())
    step_tokens: int = option(2048, "New tokens of a step.", names="--max-num-batched-tokens", type=TOKENS)


@click.command(name="plan")
@target_options
@kv_option("auto,fp8,int8,k8v4,int4", many=True)
@gathered(Asked, "asked")
@sizing_options
def command(kv: list[str], sizing: SizingOptions, asked: Asked) -> None:
    """Predict `kvq serve` on a GPU: weights, KV, activations, runtime, and how many users there is room for.

    With --engine vllm it is `vllm serve` with kvq's formats: the number of its blocks, and its maximum
    concurrency.

    With --verify an engine starts here for every KV format, and what it holds is compared with the plan,
    term by term; exit code 1 if one is off by more than 1%, or the whole process by more than 3%.
    """
    sizing.check_paths()
    if asked.verify:
        if asked.engine != "kvq":
            raise ConfigError("--verify starts kvq's engine; leave out --engine")
        from kvq.commands.plan_verify import run as verify

        verify(kv, sizing, asked)
        return
    if asked.kv_memory is not None and asked.engine == "kvq":
        raise ConfigError(
            "--kv-memory goes with --verify or --engine vllm; a GPU's pool is what is left of its memory"
        )
    gpus = sizing.gpus()
    target = sizing.target(asked.weights_gb)
    demand = _demand(sizing, asked, target)
    rows: list[dict[str, Any]] = []
    refused: list[ConfigError] = []
    for gpu, name in product(gpus, target.formats(kv)):
        try:
            rows.append(_row(sizing, asked, target, demand, gpu, name))
        except ConfigError as error:
            refused.append(error)
    if not rows:
        raise refused[0]
    from kvq.commands.plan_tables import columns, show

    remarks = vllm_remarks(rows, sizing) if asked.engine == "vllm" else []
    show(rows, assumed=sizing.calibrate is None, seats=sizing.sequences, remarks=remarks)
    for reason in dict.fromkeys(map(str, refused)):
        echo(f"left out: {reason}", err=True)
    write_rows(rows, sizing.json_path)
    if sizing.html_path is not None:
        from kvq.commands.capacity_report import write_plan

        write_plan(sizing.html_path, result_of(rows), columns(rows))


def _demand(sizing: SizingOptions, asked: Asked, target: "Target") -> "Demand":
    from kvq.capacity.lengths import Demand

    most = target.geometry.max_context
    lengths = _lengths(asked, most)
    longest = max(length.total for length in lengths)
    if (sizing.max_context or longest) < longest:
        raise ConfigError(f"--max-model-len {sizing.max_context} is below a request of {longest} tokens")
    reserved = None if asked.context is None else max(longest, sizing.max_context or most)
    return Demand(lengths=lengths, slot_tokens=asked.slot or reserved, prefix_share=asked.prefix_share)


def _lengths(asked: Asked, most: int) -> "list[Length]":
    from kvq.capacity.lengths import fixed, lognormal, read_trace

    if [asked.context, asked.lognormal, asked.trace].count(None) != 2:
        raise ConfigError(
            "how long requests are decides how many fit: give one of --context, --lognormal, --trace"
        )
    if asked.context is not None:
        return fixed(asked.context, asked.output or asked.context // 8)
    if asked.output is not None:
        raise ConfigError("--output goes with --context; distributions and traces say it themselves")
    if asked.trace is not None:
        return read_trace(asked.trace)
    try:
        median, sigma = (asked.lognormal or "").split(",")
        shape = parse_tokens(median), float(sigma)
    except ValueError as error:
        raise ConfigError(
            f"--lognormal wants MEDIAN,SIGMA such as 1024,0.8 or 8k,0.8, got {asked.lognormal!r}"
        ) from error
    return lognormal(*shape, most=most)


def _row(
    sizing: SizingOptions, asked: Asked, target: "Target", demand: "Demand", gpu: "Gpu", kv: str
) -> dict[str, Any]:
    """One KV format on one GPU.

    Raises:
        ConfigError: the model doesn't fit, or not one request beside it.
    """
    from kvq.capacity.plan.plan import make_plan

    engine = _engine(sizing, asked, gpu)
    planned = partial(make_plan, target, gpu, kv, demand, efficiency=sizing.efficiency(gpu, kv))
    plan = planned(engine=engine)
    if not plan.users.paged:
        raise ConfigError(
            f"{plan.model} on {plan.split.gpus} x {plan.gpu} with KV in {plan.kv}: not one request of up to "
            f"{demand.longest:,} tokens fits, it takes {decimal(plan.users.bytes_per_request)} of the pool's "
            f"{decimal(plan.pool_bytes)}; take narrower KV, narrower weights (--weights int4), more GPUs "
            f"(--tensor-parallel), or shorter requests"
        )
    active = None if asked.users is None else math.ceil(asked.users * asked.active)
    row = {
        "engine": asked.engine,
        **_figures(plan, demand),
        **vllm_figures(plan),
        **_at_rate(plan, asked.rate),
        "gpus_needed": active and -(-active // plan.users.paged) * plan.split.gpus,
        **_server(plan, sizing, asked, gpu, engine),
        "users_at_context": users_of_a_shorter_context(plan, planned, engine, demand.longest),
    }
    if sizing.html_path is not None:
        from kvq.capacity.plan.plan import speed_by_users, users_by_context

        row["users_by_context"] = users_by_context(target, gpu, kv, engine)
        row["speed_by_users"] = speed_by_users(plan, gpu.usd_per_hour * plan.split.gpus)
    return row


def _engine(sizing: SizingOptions, asked: Asked, gpu: "Gpu") -> "Engine | VllmEngine":
    if asked.engine == "vllm":
        return vllm_engine(sizing, asked, gpu)
    return sizing.engine(asked.step_tokens)


def _server(
    plan: "CapacityPlan", sizing: SizingOptions, asked: Asked, gpu: "Gpu", engine: "Engine | VllmEngine"
) -> dict[str, Any]:
    """Its command line, and how many sequences it runs side by side unless it is told."""
    from kvq.capacity.plan.vllm import VllmEngine

    if isinstance(engine, VllmEngine):
        return vllm_server(plan, sizing, engine, gpu)
    command = serve_command(plan, sizing, asked.step_tokens)
    return {"serve": command, "default_num_seqs": MAX_NUM_SEQS}


def _figures(plan: "CapacityPlan", demand: "Demand") -> dict[str, Any]:
    users, served = plan.users, plan.serving
    return {
        **picked(plan, "model", "gpu", "kv"),
        "tensor_parallel": plan.split.tensor,
        "pipeline_parallel": plan.split.pipeline,
        "context": demand.longest,
        "mixed_lengths": len({length.total for length in demand.lengths}) > 1,
        **picked(plan, "weights_bytes", "kv_bytes_per_token", "state_bytes", "block_bytes", "pool_bytes"),
        "num_blocks": list(plan.num_blocks),
        "max_users": users.paged,
        "contiguous_users": users.contiguous,
        "slot_tokens": demand.slot,
        "kv_bytes_per_request": users.bytes_per_request,
        "tokens_per_s": served and served.tokens_per_s,
        "requests_per_s": served and served.requests_per_s,
        "ttft_ms": served and 1e3 * served.ttft_s,
        "itl_ms": served and 1e3 * served.itl_s,
        **picked(plan, "usd_per_million_tokens", "refused"),
        "terms": [{"name": t.name, "bytes": t.nbytes, "formula": t.formula} for t in plan.terms],
    }


def _at_rate(plan: "CapacityPlan", rate: float | None) -> dict[str, Any]:
    """How a plan carries requests that arrive at a rate."""
    from kvq.capacity.plan.speed import at_rate

    if rate is None:
        return {}
    if plan.serve is None or plan.serving is None:
        raise ConfigError("--rate needs the model's speed: leave --weights-gb out")
    most = plan.serving.requests_per_s
    found = at_rate(plan.serve, rate, most=plan.users.paged)
    return {
        "utilization": rate / most,
        "in_flight": found and found.users,
        "rate_ttft_ms": found and 1e3 * found.ttft_s,
        "rate_itl_ms": found and 1e3 * found.itl_s,
        "rate_gpus": math.ceil(rate / most) * plan.split.gpus,
    }
