"""Options of `kvq plan` alone."""

from dataclasses import dataclass
from pathlib import Path

import click

from kvq.commands.shared.options import option
from kvq.commands.shared.param_types import AT_LEAST_1, FILE, SHARE, SIZE, TOKENS, Finite


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Lengths and rate of requests, the engine, and its verification on this machine."""

    context: int | None = option(None, "Tokens of each request when it ends.", type=TOKENS)
    output: int | None = option(None, "Generated tokens among these.  [default: an eighth]", type=TOKENS)
    lognormal: str | None = option(None, "MEDIAN,SIGMA of the tokens of requests, instead of --context.")
    trace: Path | None = option(
        None,
        "JSON lines with prompt_tokens and output_tokens, or CSV with TIMESTAMP, ContextTokens and "
        "GeneratedTokens, instead of --context.",
        type=FILE,
    )
    prefix_share: float = option(0.0, "Share of the prompts that all requests have in common.")
    slot: int | None = option(
        None,
        "Tokens that an engine without blocks reserves for each request.  [default: with --context the "
        "longest that the server takes, else the longest request]",
        type=TOKENS,
    )
    users: int | None = option(None, "Number of users, to find how many GPUs they need.", type=AT_LEAST_1)
    active: float = option(1.0, "Share of --users with a request at any time.", type=SHARE)
    rate: float | None = option(None, "Requests a second, for utilization and concurrency.", type=Finite())
    engine: str = option(
        "kvq",
        "Engine: kvq, or vllm with kvq's plug-in; bf16, fp16 and fp32 are then vLLM's own cache. vllm has "
        "vLLM's defaults: --block-size 16, --gpu-memory-utilization 0.92 (of the whole GPU), and its "
        "--max-num-batched-tokens for that GPU.",
        type=click.Choice(["kvq", "vllm"]),
    )
    verify: bool = option(False, "Start engines on this machine, and compare their memory.")
    kv_memory: str | None = option(
        None,
        "With --verify: size of the pools, such as 512MiB; with --engine vllm: its "
        "--kv-cache-memory-bytes.  [default: the engine's]",
        type=SIZE,
    )
    weights_gb: float | None = option(None, "GB of all weights, instead of counting them.", type=Finite())
    step_tokens: int = option(
        2048, "Most new tokens of a step.", names="--max-num-batched-tokens", type=TOKENS
    )
