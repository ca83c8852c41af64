"""`kvq simulate`: fleets of engines under a load to come, or one small engine under faults."""

from pathlib import Path
from typing import Any

import click

from kvq.commands.names import GPU, PLANNED_MODEL
from kvq.commands.options import Finite, kv_option
from kvq.commands.sizing import given_options, sizing_options
from kvq.errors import ConfigError

_FAULTS = {"faults", "seeds", "steps", "blocks"}
_COMMON = {"seed", "requests", "rate", "block_size", "max_num_seqs", "max_num_batched_tokens", "json_path"}


@click.command(name="simulate")
@click.option("--model", "-m", type=PLANNED_MODEL, help="A name of `kvq models`, a folder, or a hub name.")
@click.option("--gpu", type=GPU, help="A name of `kvq gpus`.")
@kv_option("fp16,int4", many=True)
@click.option("--rate", type=Finite(min=0, min_open=True), help="Requests per second, with random gaps.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Requests of a file instead: JSON lines (kvq's, Mooncake's) or CSV (Azure's).",
)
@click.option("--requests", type=click.IntRange(min=1), help="How many.  [default: 2000, or the whole trace]")
@click.option(
    "--input-len",
    help="Tokens of prompts: 512, 16:512, lognormal:MEDIAN:SIGMA.  [default: lognormal:256:0.7]",
)
@click.option("--output-len", help="Tokens of answers, likewise.  [default: lognormal:128:0.7]")
@click.option("--shared-prefix", default=0.0, type=Finite(0, 1), help="Of each prompt, common to many.")
@click.option("--num-prefixes", default=1, type=click.IntRange(min=1), help="Different ones of these.")
@click.option("--turns", default=1, type=click.IntRange(min=1), help="Of conversations whose prompts grow.")
@click.option("--think-s", default=30.0, type=Finite(min=0, min_open=True), help="Between turns, mean.")
@click.option("--batch-share", default=0.0, type=Finite(0, 1), help="Of requests in no hurry.")
@click.option("--replicas", help="Engines: 4, or 1,2,4 to compare.  [default: 1]")
@click.option(
    "--routing",
    help="round-robin, least-loaded, session, prefix; several to compare.  [default: least-loaded]",
)
@click.option(
    "--prefill-replicas", default=0, type=click.IntRange(min=0), help="More engines, for prompts only."
)
@click.option("--transfer-gb-s", default=50.0, type=Finite(min=0, min_open=True), help="Of KV from those.")
@click.option(
    "--overflow-waiting", type=click.IntRange(min=0), help="Waiting requests, then an API gets them."
)
@click.option("--api-input", type=Finite(), help="$ a million tokens that it takes for prompts.")
@click.option("--api-output", type=Finite(), help="$ a million tokens that it takes for answers.")
@click.option("--slo-ttft-ms", type=Finite(min=0, min_open=True), help="Goal for the first token.")
@click.option("--slo-itl-ms", type=Finite(min=0, min_open=True), help="Goal for a request's mean gap.")
@click.option("--meet", type=Finite(0, 1, min_open=True), help="Find the replicas that meet it this often.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="Sequences side by side.  [default: 256]")
@click.option("--max-num-batched-tokens", help="New tokens of a step; several to compare.  [default: 2048]")
@click.option(
    "--max-model-len", type=click.IntRange(min=2), help="Tokens of a request.  [default: the model's]"
)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@sizing_options
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Decides everything.")
@click.option("--json", "json_path", type=click.Path(), help="Write the rows as JSON.")
@click.option("--html", "html_path", type=click.Path(), help="Write a report with plots.")
@click.option("--faults", is_flag=True, help="No GPU, no model: random failures of a small engine instead.")
@click.option(
    "--seeds", default=1, type=click.IntRange(min=1), help="With --faults: runs, SEED and those after."
)
@click.option(
    "--steps", default=1000, type=click.IntRange(min=1), help="With --faults: then no more requests."
)
@click.option(
    "--blocks", type=click.IntRange(min=1), help="With --faults: per layer group.  [default: random]"
)
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Serve a load to come with the engine's own scheduler and block memory, without a GPU.

    With --model and --gpu steps take what a roofline (or --calibrate) says: latency, throughput,
    preemptions, cost, for every KV format and policy, or the number of GPUs that an SLO needs. The
    same seed gives the same digest.

    Without them a small engine and its load are drawn from each seed, with --faults also failures:
    every token is compared with what the request gets alone, and nothing may leak, starve or end
    twice. Exit code 1 if an invariant breaks.
    """
    from kvq import fileio

    for path in filter(None, (options["json_path"], options["html_path"])):
        fileio.check_writable(path)
    given = given_options(context)
    if options["gpu"] is None and options["model"] is None and not given - _FAULTS - _COMMON:
        from kvq.commands.simulate_faults import run

        run(
            options["faults"],
            options["seed"],
            options["seeds"],
            options["steps"],
            options["json_path"],
            {
                "requests": options["requests"],
                "rate": options["rate"],
                "blocks": options["blocks"],
                "block_size": options["block_size"] if "block_size" in given else None,
                "max_num_seqs": options["max_num_seqs"],
                "max_num_batched_tokens": _whole(
                    "--max-num-batched-tokens", options["max_num_batched_tokens"]
                ),
            },
        )
        return
    if wrong := given & _FAULTS:
        names = ", ".join(f"--{name}" for name in sorted(wrong))
        raise ConfigError(f"{names} belong to runs without --gpu; leave them out")
    if options["gpu"] is None or options["model"] is None:
        raise ConfigError(
            "a load is simulated on a model and a GPU: give --model and --gpu; see kvq models, kvq gpus"
        )
    from kvq.commands.simulate_fleet import run as run_fleet

    run_fleet(options | {"given": given})


def _whole(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError as error:
        raise ConfigError(f"{name} takes a whole number here, got {text!r}") from error
    if number < 1:
        raise ConfigError(f"{name} must be at least 1, got {number}")
    return number
