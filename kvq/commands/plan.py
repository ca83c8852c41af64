"""`kvq plan`: how many users fit on which GPU, term by term."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.names import GPUS, PLANNED_MODEL
from kvq.commands.options import Finite, Size, kv_option
from kvq.commands.plan_serve import serve_command, told, users_of_a_shorter_context
from kvq.commands.results import result_of, write_rows
from kvq.commands.screen import echo
from kvq.commands.sizing import (
    find_efficiency,
    find_gpus,
    given_options,
    make_engine,
    make_target,
    sizing_options,
)
from kvq.errors import ConfigError
from kvq.extras import PLOTS, require
from kvq.sizes import binary, decimal, dollars

if TYPE_CHECKING:
    from rich.table import Table

    from kvq.capacity.plan.gpus import Gpu
    from kvq.capacity.plan.lengths import Length
    from kvq.capacity.plan.plan import CapacityPlan, Engine, Target

_FORMATS = "fp16,fp8,int8,k8v4,int4"


@click.command(name="plan")
@click.option(
    "--model",
    "-m",
    required=True,
    type=PLANNED_MODEL,
    help="A name of `kvq models`, a folder, or a hub name.",
)
@click.option("--gpu", type=GPUS, help="Names of `kvq gpus`, separated by commas.")
@kv_option(_FORMATS, many=True)
@click.option("--context", type=click.IntRange(min=1), help="Tokens of each request when it ends.")
@click.option("--output", type=click.IntRange(min=1), help="Of these, generated.  [default: an eighth]")
@click.option("--lognormal", help="MEDIAN,SIGMA of the tokens of requests, instead of --context.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="JSON lines with prompt_tokens and output_tokens, instead of --context.",
)
@click.option("--prefix-share", default=0.0, help="Of the prompts, what all requests share.  [default: 0]")
@click.option(
    "--slot",
    type=click.IntRange(min=1),
    help="Tokens that an engine without blocks reserves for each request.  [default: with --context the "
    "longest that the server takes, else the longest request]",
)
@click.option("--users", type=click.IntRange(min=1), help="Tells how many GPUs so many users need.")
@click.option(
    "--active",
    default=1.0,
    show_default=True,
    type=Finite(0, 1, min_open=True),
    help="Share of --users with a request at any time.",
)
@click.option(
    "--rate", type=Finite(), help="Requests a second; tells utilization, and how many are there at once."
)
@click.option("--verify", is_flag=True, help="Start engines on this machine, and compare their memory.")
@click.option(
    "--kv-memory", type=Size(), help="With --verify: their pools, such as 512MiB.  [default: as the engine's]"
)
@click.option("--weights-gb", type=Finite(), help="GB of all weights, instead of counting them.")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    help="Requests side by side.  [default: as many as fit, which the server has to be told]",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    help="Longest context that it takes, for which layer groups share memory.  [default: the model's]",
)
@sizing_options
@click.option("--json", "json_path", type=click.Path(), help="Write the plans as JSON.")
@click.option("--html", "html_path", type=click.Path(), help="Write a report with plots.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Predict `kvq serve` on a GPU: weights, KV, activations, runtime, and how many users there is room for.

    With --verify an engine starts here for every KV format, and what it holds is compared with the plan,
    term by term; exit code 1 if one is off by more than 1%, or the whole process by more than 3%.
    """
    from kvq import fileio
    from kvq.capacity.plan.plan import make_plan

    for path in filter(None, (options["json_path"], options["html_path"])):
        fileio.check_writable(path)
    if options["verify"]:
        from kvq.commands.plan_verify import run as verify

        verify(options, given_options(context))
        return
    if options["kv_memory"] is not None:
        raise ConfigError("--kv-memory goes with --verify; a GPU's pool is what is left of its memory")
    if options["gpu"] is None:
        raise ConfigError(
            "users are counted on a GPU: give --gpu, one or several names of kvq gpus, or --verify"
        )
    if options["html_path"] is not None:
        require("--html", PLOTS)
    target = make_target(options)
    lengths = _lengths(options, target)
    most, longest = target.geometry.max_context, max(length.total for length in lengths)
    if longest > most:
        raise ConfigError(f"a request of {longest:,} tokens is above the model's context of {most:,}")
    if (options["max_model_len"] or longest) < longest:
        raise ConfigError(
            f"--max-model-len {options['max_model_len']} is below a request of {longest} tokens"
        )
    slot = options["slot"] or (longest if options["context"] is None else options["max_model_len"] or most)
    if slot < longest:
        raise ConfigError(f"--slot {slot} does not hold a request of {longest} tokens")
    engine = make_engine(options, step_tokens=options["max_num_batched_tokens"])
    active = None if options["users"] is None else math.ceil(options["users"] * options["active"])
    rows: list[dict[str, Any]] = []
    refused: list[ConfigError] = []
    for gpu in find_gpus(options):
        for kv in dict.fromkeys(options["kv"]):

            def planned(max_context: int | None, gpu: "Gpu" = gpu, kv: str = kv) -> "CapacityPlan":
                return make_plan(
                    target,
                    gpu,
                    kv,
                    lengths,
                    slot_tokens=slot,
                    engine=replace(engine, max_context=max_context),
                    prefix_share=options["prefix_share"],
                    efficiency=find_efficiency(options, gpu, kv),
                )

            try:
                plan = planned(engine.max_context)
                if not plan.users.paged:
                    raise ConfigError(_nobody(plan, lengths))
                row = _row(plan, lengths, active) | _load(plan, options["rate"])
                row["slot_tokens"] = slot
                row["serve"] = serve_command(plan, options)
                row["users_at_context"] = users_of_a_shorter_context(plan, longest, engine, planned)
                if options["html_path"] is not None:
                    row |= _curves(plan, target, gpu, engine)
                rows.append(row)
            except ConfigError as error:
                refused.append(error)
    if not rows:
        raise refused[0]
    _print(rows, options["users"], assumed=options["calibrate"] is None)
    _print_server(rows, options["max_num_seqs"])
    for reason in dict.fromkeys(map(str, refused)):
        echo(f"left out: {reason}", err=True)
    write_rows(rows, options["json_path"])
    if options["html_path"] is not None:
        from kvq.commands.capacity_report import write_plan

        write_plan(options["html_path"], result_of(rows))


def _curves(plan: "CapacityPlan", target: "Target", gpu: "Gpu", engine: "Engine") -> dict[str, Any]:
    from kvq.capacity.plan.curves import speed_by_users, users_by_context

    price = gpu.usd_per_hour * plan.split.gpus
    longest = target.geometry.max_context
    return {
        "users_by_context": users_by_context(target, gpu, plan.kv, longest=longest, engine=engine),
        "speed_by_users": speed_by_users(plan, price),
    }


def _lengths(options: dict[str, Any], target: "Target") -> "list[Length]":
    from kvq.capacity.plan.lengths import lognormal, read_trace
    from kvq.capacity.plan.planner import fixed_context

    given = [name for name in ("context", "lognormal", "trace") if options[name] is not None]
    if len(given) != 1:
        raise ConfigError(
            "how long requests are decides how many fit: give one of --context, --lognormal, --trace"
        )
    if options["output"] is not None and options["context"] is None:
        raise ConfigError("--output goes with --context; distributions and traces say it themselves")
    if options["context"] is not None:
        return fixed_context(target, options["context"], options["output"])
    if options["trace"] is not None:
        return read_trace(options["trace"])
    try:
        median, sigma = options["lognormal"].split(",")
        return lognormal(int(median), float(sigma), most=target.geometry.max_context)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"--lognormal wants MEDIAN,SIGMA such as 1024,0.8, got {options['lognormal']!r}"
        ) from error


def _row(plan: "CapacityPlan", lengths: "list[Length]", users: int | None) -> dict[str, Any]:
    gpus = None if users is None or not plan.users.paged else -(-users // plan.users.paged) * plan.split.gpus
    served = plan.serving
    return {
        "model": plan.model,
        "gpu": plan.gpu,
        "kv": plan.kv,
        "tensor_parallel": plan.split.tensor,
        "pipeline_parallel": plan.split.pipeline,
        "context": max(length.total for length in lengths),
        "mixed_lengths": len({length.total for length in lengths}) > 1,
        "weights_bytes": plan.weights_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "block_bytes": plan.block_bytes,
        "pool_bytes": plan.pool_bytes,
        "num_blocks": list(plan.num_blocks),
        "max_users": plan.users.paged,
        "contiguous_users": plan.users.contiguous,
        "kv_bytes_per_request": plan.users.bytes_per_request,
        "tokens_per_s": None if served is None else served.tokens_per_s,
        "requests_per_s": None if served is None else served.requests_per_s,
        "ttft_ms": None if served is None else 1e3 * served.ttft_s,
        "itl_ms": None if served is None else 1e3 * served.itl_s,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "gpus_needed": gpus,
        "latent_kv_bytes_per_token": None if plan.latent is None else plan.latent.bytes_per_token,
        "latent_users": None if plan.latent is None else plan.latent.users,
        "terms": [{"name": t.name, "bytes": t.nbytes, "formula": t.formula} for t in plan.terms],
    }


def _nobody(plan: "CapacityPlan", lengths: "list[Length]") -> str:
    """Why not even one request fits."""
    held, longest = plan.users.bytes_per_request, max(length.total for length in lengths)
    return (
        f"{plan.model} on {plan.split.gpus} x {plan.gpu} with KV in {plan.kv}: not one request of up to "
        f"{longest:,} tokens fits, it takes {decimal(held)} of the pool's {decimal(plan.pool_bytes)}; take "
        f"narrower KV, narrower weights (--weights int4), more GPUs (--tensor-parallel), or shorter requests"
    )


def _load(plan: "CapacityPlan", rate: float | None) -> dict[str, Any]:
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
        "in_flight": None if found is None else found.users,
        "rate_ttft_ms": None if found is None else 1e3 * found.ttft_s,
        "rate_itl_ms": None if found is None else 1e3 * found.itl_s,
        "rate_gpus": math.ceil(rate / most) * plan.split.gpus,
    }


def _print(rows: list[dict[str, Any]], users: int | None, *, assumed: bool) -> None:
    from kvq.commands.tables import console, new_table

    out = console()
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        first = next(row for row in rows if row["gpu"] == gpu)
        spread = first["tensor_parallel"] * first["pipeline_parallel"]
        out.print(
            f"{first['model']} on {f'{spread} x ' if spread > 1 else ''}{gpu}, per GPU", highlight=False
        )
        terms = new_table(("", "decimal", "binary", "formula"), ("", "formula"), no_wrap=False)
        for term in first["terms"]:
            what = term["name"] + (f", {first['kv']}" if term["name"] == "KV pool" else "")
            terms.add_row(what, decimal(term["bytes"]), binary(term["bytes"]), term["formula"])
        out.print(terms)
        out.print()
    columns = ["GPU", "KV", "KV/token", "KV/request", "users", f"in slots of {rows[0]['slot_tokens']:,}"]
    columns += ["tokens/s", "TTFT, ms", "ITL, ms", "$ / million"]
    if users is not None:
        columns.append("GPUs needed")
    table = new_table(columns, ("GPU", "KV"), no_wrap=False)
    for row in rows:
        cells = [row["gpu"], row["kv"], binary(row["kv_bytes_per_token"])]
        cells += [decimal(row["kv_bytes_per_request"]), _cell(row["max_users"])]
        cells += [_cell(row["contiguous_users"]), _cell(row["tokens_per_s"]), _cell(row["ttft_ms"])]
        cells += [_cell(row["itl_ms"], 1), dollars(row["usd_per_million_tokens"])]
        table.add_row(*cells, *([_cell(row["gpus_needed"])] if users is not None else []))
    out.print(table)
    if "utilization" in rows[0]:
        out.print(_load_table(rows))
    for row in rows:
        if row["latent_users"] is not None:
            out.print(
                f"{row['gpu']}: engines that keep latent vectors in {row['kv']} need "
                f"{binary(row['latent_kv_bytes_per_token'])} a token: "
                f"{row['latent_users']:,} users; kvq's keeps K and V of every head",
                highlight=False,
            )
    if rows[0]["tokens_per_s"] is not None:
        out.print(
            f"Speed is a roofline at as many users as fit, with {'assumed' if assumed else 'measured'} "
            f"efficiencies; $ are for generated tokens at full load.",
            highlight=False,
        )


def _print_server(rows: list[dict[str, Any]], seats: int | None) -> None:
    """Which server all that is of."""
    from kvq.commands.tables import console

    out = console()
    if rows[0]["serve"] is None:
        out.print(
            "kvq serve runs on one GPU; this is the fullest one of an engine that spreads the model so.",
            highlight=False,
        )
    else:
        out.print("Predicted is, on that GPU with nothing else on it:", highlight=False)
    for row in rows:
        for line in told(row, seats=seats):
            out.print(line, highlight=False, soft_wrap=True)


def _load_table(rows: list[dict[str, Any]]) -> "Table":
    from kvq.commands.tables import new_table

    heads = ("GPU", "KV", "utilization", "requests at once", "ITL, ms", "GPUs needed")
    table = new_table(heads, ("GPU", "KV"), no_wrap=False, title="at that rate")
    for row in rows:
        there = "too many" if row["in_flight"] is None else f"{row['in_flight']:,}"
        cells = [f"{row['utilization']:.0%}", there, _cell(row["rate_itl_ms"], 1), f"{row['rate_gpus']:,}"]
        table.add_row(row["gpu"], row["kv"], *cells)
    return table


def _cell(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
