"""`kvq plan`: a model's memory on GPUs term by term, and the number of users that fit."""

import math
from functools import partial
from itertools import product
from typing import Any

import click

from kvq.capacity.lengths import Demand, Length, fixed, lognormal, read_trace
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.memory import Engine
from kvq.capacity.plan.plan import CapacityPlan, at_rate, make_plan, speed_by_users, users_by_context
from kvq.capacity.plan.target import Target
from kvq.capacity.plan.vllm import VllmEngine
from kvq.commands.capacity import plan_serve
from kvq.commands.capacity.sizing import PlanOptions, SizingOptions, sizing_options, target_options
from kvq.commands.shared.declare import gathered, picked
from kvq.commands.shared.options import kv_option
from kvq.commands.shared.results import result_of, write_rows
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError
from kvq.sizes import decimal, parse_tokens
from kvq.sizing.pools import MAX_NUM_SEQS


@click.command(name="plan")
@target_options
@kv_option("auto,fp8,int8,k8v4,int4", many=True)
@gathered(PlanOptions, "options")
@sizing_options
def command(kv: list[str], sizing: SizingOptions, options: PlanOptions) -> None:
    """Predict `kvq serve` on a GPU: weights, KV, activations, runtime, and the number of users that fit.

    With --engine vllm, predict `vllm serve` with kvq's formats: its number of blocks and maximum concurrency.

    With --verify, start an engine on this machine for every KV format, and compare its memory with the plan
    term by term. The exit code is 1 if a term is off by more than 1%, or the entire process by more than 3%.
    """
    sizing.check_paths()
    if options.verify:
        if options.engine != "kvq":
            raise ConfigError("--verify starts kvq's engine; leave out --engine")
        from kvq.commands.capacity.plan_verify import run as verify

        verify(kv, sizing, options)
        return
    if options.kv_memory is not None and options.engine == "kvq":
        raise ConfigError(
            "--kv-memory goes with --verify or --engine vllm; a GPU's pool is the rest of its memory"
        )
    gpus = sizing.gpus()
    target = sizing.target(options.weights_gb)
    demand = _demand(sizing, options, target)
    rows: list[dict[str, Any]] = []
    refused: list[ConfigError] = []
    for gpu, name in product(gpus, target.formats(kv)):
        try:
            rows.append(_row(sizing, options, target, demand, gpu, name))
        except ConfigError as error:
            refused.append(error)
    if not rows:
        raise refused[0]
    remarks = plan_serve.vllm_remarks(rows, sizing) if options.engine == "vllm" else []
    plan_serve.show(rows, assumed=sizing.calibrate is None, max_num_seqs=sizing.sequences, remarks=remarks)
    for reason in dict.fromkeys(map(str, refused)):
        echo(f"left out: {reason}", err=True)
    write_rows(rows, sizing.json_path)
    if sizing.html_path is not None:
        from kvq.commands.capacity.capacity_report import write_plan

        write_plan(sizing.html_path, result_of(rows), plan_serve.columns(rows))


def _demand(sizing: SizingOptions, options: PlanOptions, target: Target) -> Demand:
    most = target.geometry.max_context
    lengths = _lengths(options, most)
    longest = max(length.total for length in lengths)
    if (sizing.max_context or longest) < longest:
        raise ConfigError(f"--max-model-len {sizing.max_context} is below a request of {longest} tokens")
    reserved = None if options.context is None else max(longest, sizing.max_context or most)
    return Demand(lengths=lengths, slot_tokens=options.slot or reserved, prefix_share=options.prefix_share)


def _lengths(options: PlanOptions, most: int) -> list[Length]:
    if [options.context, options.lognormal, options.trace].count(None) != 2:
        raise ConfigError(
            "the length of requests decides how many fit: give one of --context, --lognormal, --trace"
        )
    if options.context is not None:
        return fixed(options.context, options.output or options.context // 8)
    if options.output is not None:
        raise ConfigError("--output goes with --context; distributions and traces have their own outputs")
    if options.trace is not None:
        return read_trace(options.trace)
    try:
        median, sigma = (options.lognormal or "").split(",")
        shape = parse_tokens(median), float(sigma)
    except ValueError as error:
        raise ConfigError(
            f"--lognormal wants MEDIAN,SIGMA such as 1024,0.8 or 8k,0.8, got {options.lognormal!r}"
        ) from error
    return lognormal(*shape, most=most)


def _row(
    sizing: SizingOptions, options: PlanOptions, target: Target, demand: Demand, gpu: Gpu, kv: str
) -> dict[str, Any]:
    """Plan one KV format on one GPU, or raise ConfigError if the model and one request don't fit."""
    engine: Engine = sizing.engine(options.step_tokens)
    if options.engine == "vllm":
        engine = plan_serve.vllm_engine(sizing, options, gpu)
    planned = partial(make_plan, target, gpu, kv, demand, efficiency=sizing.efficiency(gpu, kv))
    plan = planned(engine=engine)
    if not plan.users.paged:
        raise ConfigError(
            f"{plan.model} on {plan.split.gpus} x {plan.gpu} with KV in {plan.kv}: not one request of up to "
            f"{demand.longest:,} tokens fits, it takes {decimal(plan.users.bytes_per_request)} of the pool's "
            f"{decimal(plan.pool_bytes)}; take narrower KV, narrower weights (--weights int4), more GPUs "
            f"(--tensor-parallel), or shorter requests"
        )
    if isinstance(engine, VllmEngine):
        server = plan_serve.vllm_server(plan, sizing, engine, gpu)
    else:
        command = plan_serve.serve_command(plan, sizing, options.step_tokens)
        server = {"serve": command, "default_num_seqs": MAX_NUM_SEQS}
    active = None if options.users is None else math.ceil(options.users * options.active)
    row = {
        "engine": options.engine,
        **_figures(plan, demand),
        **(plan.vllm or {}),
        **_at_rate(plan, options.rate),
        "gpus_needed": active and -(-active // plan.users.paged) * plan.split.gpus,
        **server,
        "users_at_context": plan_serve.users_at_context(plan, planned, engine, demand.longest),
    }
    if sizing.html_path is not None:
        row["users_by_context"] = users_by_context(target, gpu, kv, engine)
        row["speed_by_users"] = speed_by_users(plan, gpu.usd_per_hour * plan.split.gpus)
    return row


def _figures(plan: CapacityPlan, demand: Demand) -> dict[str, Any]:
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


def _at_rate(plan: CapacityPlan, rate: float | None) -> dict[str, Any]:
    """Return figures for requests that arrive at `rate`, or an empty dict if it is None."""
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
