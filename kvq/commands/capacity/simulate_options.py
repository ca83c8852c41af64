"""Options of `kvq simulate` alone."""

from dataclasses import dataclass
from pathlib import Path

import click

from kvq.commands.shared.options import AT_LEAST_1, FILE, POSITIVE, TOKENS, Finite, Several, option

_ROUTINGS = ("round-robin", "two-choices", "least-loaded", "session", "prefix", "affinity")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOptions:
    """A load, the fleet that serves it, what they must keep, and what goes wrong."""

    rate: float | None = option(None, "Requests per second, with random gaps.", type=POSITIVE)
    trace: Path | None = option(
        None, "Requests of a file: JSON lines (kvq's, Mooncake's) or CSV (Azure's).", type=FILE
    )
    requests: int | None = option(None, "How many.  [default: 2000, or the whole trace]", type=AT_LEAST_1)
    input_len: str = option("lognormal:256:0.7", "Tokens of prompts: 512, 16:512, lognormal:MEDIAN:SIGMA.")
    output_len: str = option("lognormal:128:0.7", "Tokens of answers, likewise.")
    shared_prefix: float = option(0.0, "Of each prompt, common to many.", type=Finite(0, 1))
    num_prefixes: int = option(1, "Different ones of these.", type=AT_LEAST_1)
    turns: int = option(1, "Of conversations whose prompts grow.", type=AT_LEAST_1)
    think_s: float = option(30.0, "Between turns, mean.", type=POSITIVE)
    batch_share: float = option(0.0, "Of requests in no hurry.", type=Finite(0, 1))
    replicas: tuple[int, ...] | None = option(
        None, "Engines: 4, or 1,2,4 to compare.  [default: 1]", type=Several(AT_LEAST_1)
    )
    routing: tuple[str, ...] = option(
        "least-loaded", f"{', '.join(_ROUTINGS)}; several to compare.", type=Several(click.Choice(_ROUTINGS))
    )
    prefill_replicas: int = option(0, "More engines, for prompts only.", type=click.IntRange(min=0))
    transfer_gb_s: float = option(50.0, "Of KV from those.", type=POSITIVE)
    overflow_waiting: int | None = option(
        None, "Waiting requests, then an API gets them.", type=click.IntRange(min=0)
    )
    slo_ttft_ms: float | None = option(None, "Goal for the first token.", type=POSITIVE)
    slo_itl_ms: float | None = option(None, "Goal for a request's mean gap.", type=POSITIVE)
    meet: float | None = option(
        None, "Find the replicas that meet it this often.", type=Finite(0, 1, min_open=True)
    )
    max_num_batched_tokens: tuple[int, ...] = option(
        "2048", "New tokens of a step; several to compare.", type=Several(TOKENS)
    )
    prefix_caching: bool = option(
        True, "Find what was computed before.", names="--prefix-caching/--no-prefix-caching"
    )
    speculation: str | None = option(
        None,
        "Drafted tokens: k=4,acceptance=0.8,draft=0.1. acceptance, how probably a draft is right if those "
        "before it were, is needed; k: most of a sequence in a step (4); draft: a pass of the draft, of a "
        "decode step (0, as of n-grams); adapts=false: always k, not as many as pay.  [default: off]",
    )
    seed: int = option(0, "Decides everything.", type=click.IntRange(min=0))
    faults: bool = option(False, "What production sees: clients leave, steps are slow, engines die.")
