"""`kvq plan`: how many users fit on which GPU, term by term."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import kv_option
from kvq.errors import ConfigError

if TYPE_CHECKING:
    from kvq.capacity.plan.lengths import Length
    from kvq.capacity.plan.plan import CapacityPlan, Target

_FORMATS = "fp16,fp8,int8,k8v4,int4"


@click.command(name="plan")
@click.option("--model", "-m", required=True, help="A name of `kvq models`, a folder, or a hub name.")
@click.option("--gpu", required=True, help="Names of `kvq gpus`, separated by commas.")
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
    help="Tokens reserved a request without blocks.  [default: the longest]",
)
@click.option("--users", type=click.IntRange(min=1), help="Requests at once; tells how many GPUs they need.")
@click.option(
    "--weights", default="fp16", show_default=True, help="fp32, bf16, fp16, fp8, int8, int4 or nf4."
)
@click.option("--weights-gb", type=float, help="GB of all weights, instead of counting them.")
@click.option("--tensor-parallel", "-tp", default=1, show_default=True, help="GPUs that share each layer.")
@click.option(
    "--pipeline-parallel", "-pp", default=1, show_default=True, help="GPUs that share the layers out."
)
@click.option("--runtime-gb", default=1.5, show_default=True, help="Driver, libraries, graphs, per GPU.")
@click.option(
    "--gpu-memory-utilization", default=1.0, show_default=True, help="Share of the GPU to use at all."
)
@click.option("--block-size", type=click.IntRange(1, 4096), default=32, show_default=True, help="Tokens.")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--gpus", "gpu_file", type=click.Path(path_type=Path), help="A file of GPUs instead of kvq's own."
)
@click.option("--json", "json_path", type=click.Path(), help="Write the plans as JSON.")
def command(**options: Any) -> None:
    """Plan memory: weights, KV, activations, runtime, and how many users what is left holds."""
    from kvq import fileio
    from kvq.capacity.plan.gpus import find_gpu, read_gpus
    from kvq.capacity.plan.plan import Engine, make_plan

    if options["json_path"] is not None:
        fileio.check_writable(options["json_path"])
    target = _target(options)
    lengths = _lengths(options, target)
    slot = options["slot"] or max(length.total for length in lengths)
    engine = Engine(
        block_size=options["block_size"],
        step_tokens=options["max_num_batched_tokens"],
        sequences=options["max_num_seqs"],
        runtime_bytes=round(options["runtime_gb"] * 1e9),
        memory_fraction=options["gpu_memory_utilization"],
    )
    own = None if options["gpu_file"] is None else read_gpus(options["gpu_file"])
    plans: list[CapacityPlan] = []
    refused: list[ConfigError] = []
    for name in options["gpu"].split(","):
        gpu = find_gpu(name.strip(), own)
        for kv in options["kv"]:
            try:
                plan = make_plan(
                    target,
                    gpu,
                    kv,
                    lengths,
                    slot_tokens=slot,
                    engine=engine,
                    prefix_share=options["prefix_share"],
                )
                plans.append(plan)
            except ConfigError as error:
                refused.append(error)
    if not plans:
        raise refused[0]
    rows = [_row(plan, lengths, options["users"]) for plan in plans]
    _print(rows, options["users"])
    for reason in dict.fromkeys(map(str, refused)):
        click.echo(f"left out: {reason}", err=True)
    if options["json_path"] is not None:
        import torch

        from kvq.evals.results import envelope, write_json

        write_json(options["json_path"], envelope(["kvq", *sys.argv[1:]], torch.device("cpu"), rows))


def _target(options: dict[str, Any]) -> "Target":
    from kvq.capacity.plan.known import known_models
    from kvq.capacity.plan.memory import Split
    from kvq.capacity.plan.planner import make_target

    name, given = options["model"], options["weights_gb"]
    if given is not None and not given > 0:
        raise ConfigError(f"--weights-gb must be above 0, got {given}")
    target = make_target(
        name if name.lower() in known_models() else _folder(name),
        weights=options["weights"],
        weight_bytes=None if given is None else round(given * 1e9),
        split=Split(tensor=options["tensor_parallel"], pipeline=options["pipeline_parallel"]),
    )
    return replace(target, name=name)


def _folder(name: str) -> Path | str:
    """Of a model that has files: here, embedded, or on the hub; else the name itself."""
    if not (Path(name).exists() or "/" in name or name == "tiny"):
        return name
    from kvq.models.resolve import resolve_model

    return resolve_model(name, weights=False)


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
        "weights_bytes": plan.weights_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "block_bytes": plan.block_bytes,
        "pool_bytes": plan.pool_bytes,
        "num_blocks": list(plan.num_blocks),
        "max_users": plan.users.paged,
        "contiguous_users": plan.users.contiguous,
        "kv_bytes_per_request": plan.users.bytes_per_request,
        "tokens_per_s": None if served is None else served.tokens_per_s,
        "ttft_ms": None if served is None else 1e3 * served.ttft_s,
        "itl_ms": None if served is None else 1e3 * served.itl_s,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "gpus_needed": gpus,
        "terms": [{"name": t.name, "bytes": t.nbytes, "formula": t.formula} for t in plan.terms],
    }


def _print(rows: list[dict[str, Any]], users: int | None) -> None:
    from rich.table import Table

    from kvq.commands.tables import console

    out = console()
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        first = next(row for row in rows if row["gpu"] == gpu)
        spread = first["tensor_parallel"] * first["pipeline_parallel"]
        out.print(
            f"{first['model']} on {f'{spread} x ' if spread > 1 else ''}{gpu}, per GPU", highlight=False
        )
        terms = Table(box=None, pad_edge=False)
        for name in ("", "GB", "GiB", "formula"):
            terms.add_column(name, justify="right" if name.startswith("G") else "left")
        for term in first["terms"]:
            gb, gib = term["bytes"] / 1e9, term["bytes"] / 2**30
            what = term["name"] + (f", {first['kv']}" if term["name"] == "KV pool" else "")
            terms.add_row(what, f"{gb:.2f}", f"{gib:.2f}", term["formula"])
        out.print(terms)
        out.print()
    table = Table(box=None, pad_edge=False)
    columns = ["GPU", "KV", "KiB/token", "GB/request", "users", "without blocks"]
    columns += ["tokens/s", "TTFT, ms", "ITL, ms", "$ / million"]
    if users is not None:
        columns.append("GPUs needed")
    for name in columns:
        table.add_column(name, justify="left" if name in ("GPU", "KV") else "right")
    for row in rows:
        cells = [row["gpu"], row["kv"], f"{row['kv_bytes_per_token'] / 1024:,.1f}"]
        cells += [f"{row['kv_bytes_per_request'] / 1e9:.3f}", _cell(row["max_users"])]
        cells += [_cell(row["contiguous_users"]), _cell(row["tokens_per_s"]), _cell(row["ttft_ms"])]
        cells += [_cell(row["itl_ms"], 1), _cell(row["usd_per_million_tokens"], 2)]
        table.add_row(*cells, *([_cell(row["gpus_needed"])] if users is not None else []))
    out.print(table)
    if rows[0]["tokens_per_s"] is not None:
        out.print(
            "Speed is a roofline at as many users as fit, with assumed efficiencies; $ are for generated "
            "tokens at full load.",
            highlight=False,
        )


def _cell(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
