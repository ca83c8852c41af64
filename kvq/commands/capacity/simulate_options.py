"""Options specific to `kvq simulate`."""

from dataclasses import dataclass
from pathlib import Path

import click

from kvq.commands.shared.declare import option
from kvq.commands.shared.param_types import (
    AT_LEAST_1,
    FILE,
    NATURAL,
    POSITIVE,
    SHARE,
    SIZE,
    TOKENS,
    Finite,
    Several,
)

_ROUTINGS = ("round-robin", "two-choices", "least-loaded", "session", "prefix", "affinity")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """Options for the load, the fleet that serves the load, the goals, and faults."""

    rate: float | None = option(None, "Requests per second, with random gaps.", type=POSITIVE)
    trace: Path | None = option(None, "JSON lines (kvq's, agents', Mooncake's) or Azure's CSV.", type=FILE)
    requests: int | None = option(
        None, "Number of requests.  [default: 2000, or the trace's]", type=AT_LEAST_1
    )
    input_len: str = option("lognormal:256:0.7", "Tokens of prompts: 512, 16:512, lognormal:MEDIAN:SIGMA.")
    output_len: str = option("lognormal:128:0.7", "Tokens of answers, in the same notation.")
    shared_prefix: float = option(0.0, "Share of each prompt that others have, too.", type=Finite(0, 1))
    num_prefixes: int = option(1, "Number of different shared prefixes.", type=AT_LEAST_1)
    turns: int = option(1, "Turns of each conversation; its prompts grow.", type=AT_LEAST_1)
    think_s: float = option(30.0, "Mean seconds between turns.", type=POSITIVE)
    batch_share: float = option(0.0, "Share of requests with batch priority.", type=Finite(0, 1))
    replicas: tuple[int, ...] | None = option(
        None, "Number of engines: 4, or 1,2,4 to compare.  [default: 1]", type=Several(AT_LEAST_1)
    )
    routing: tuple[str, ...] = option(
        "least-loaded", f"{', '.join(_ROUTINGS)}; several to compare.", type=Several(click.Choice(_ROUTINGS))
    )
    prefill_replicas: int = option(0, "Further engines for prompts only.", type=NATURAL)
    transfer_gb_s: float = option(50.0, "GB/s of KV from the prefill replicas.", type=POSITIVE)
    overflow_waiting: int | None = option(None, "Waiting requests before an API gets more.", type=NATURAL)
    slo_ttft_ms: float | None = option(None, "Goal for the first token.", type=POSITIVE)
    slo_itl_ms: float | None = option(None, "Goal for a request's mean gap.", type=POSITIVE)
    meet: float | None = option(None, "Find the replicas that meet goals for this share.", type=SHARE)
    max_num_batched_tokens: tuple[int, ...] = option(
        "2048", "Most new tokens of a step; several to compare.", type=Several(TOKENS)
    )
    kv_host: tuple[str, ...] = option("0", "Host memory for KV; several to compare.", type=Several(SIZE))
    kv_disk: tuple[str, ...] = option("0", "Disk for KV; several to compare.", type=Several(SIZE))
    kv_ladder: str = option("", "Formats in which cold blocks stay in the pool.")
    prefix_caching: bool = option(
        True, "Reuse the KV of common prefixes.", names="--prefix-caching/--no-prefix-caching"
    )
    speculation: str | None = option(
        None,
        "Drafted tokens, such as k=4,acceptance=0.8,draft=0.1. acceptance (needed): probability that a draft "
        "is right if those before it were; k: most drafts of a sequence in a step (4); draft: cost of a "
        "draft pass as a share of a decode step (0, as for n-grams); adapts=false: always k drafts, not as "
        "many as pay.  [default: off]",
    )
    seed: int = option(0, "Seed of everything random.", type=NATURAL)
    faults: bool = option(False, "Simulate faults: clients leave, steps are slow, engines crash.")
