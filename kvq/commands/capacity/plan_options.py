"""Options of `kvq plan` alone."""

from dataclasses import dataclass
from pathlib import Path

import click

from kvq.commands.shared.options import AT_LEAST_1, FILE, TOKENS, Finite, Size, option


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
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
