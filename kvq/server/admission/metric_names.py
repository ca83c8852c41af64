"""The names that metrics go by: kvq's own, and those that people's dashboards know."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvq.errors import ConfigError, nearest


class Called(NamedTuple):
    """A metric's name, what it says, and its own labels."""

    name: str
    text: str
    labels: tuple[str, ...] = ()


class Shape(NamedTuple):
    """A histogram's name, what it says, and its buckets."""

    name: str
    text: str
    buckets: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Names:
    """All metrics under one kind of names, by what `Metrics` and `Source` call their values.

    `endings`: what the last label of `ends` says of a request's status (success, error, cancelled, or why it
    was not taken) and, of results that ended by themselves, of "stop" and "length". What it doesn't name is
    not counted.
    """

    ends: Called  # a label before the last is the model's name
    endings: Mapping[str, str]
    observed: Mapping[str, Shape]
    totals: Sequence[tuple[str, Called]]
    gauges: Mapping[str, Called]
    block_times: Mapping[str, Called] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)  # of all; None: the model's name


_TOKENS = [mantissa * 10.0**power for power in range(7) for mantissa in (1, 2, 5)][:-1]  # up to 2 million
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_LATENCY_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_RATIOS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_STATUSES = ("success", "error", "cancelled", "timeout", "invalid", "limited", "refused")

KVQ = Names(
    ends=Called("kvq_requests", "Requests that ended, by how.", ("status",)),
    endings={status: status for status in _STATUSES},
    observed={
        "ttft": Shape("kvq_ttft_seconds", "From arrival at the engine to the first token.", _TTFT_S),
        "itl": Shape("kvq_itl_seconds", "Between neighbouring tokens of a request.", _ITL_S),
        "e2e": Shape(
            "kvq_request_latency_seconds", "From arrival at the engine to the last token.", _LATENCY_S
        ),
        "queue": Shape("kvq_queue_seconds", "From arrival at the engine to the first blocks.", _TTFT_S),
        "prefill": Shape("kvq_prefill_seconds", "From the first blocks to the first token.", _TTFT_S),
        "decode": Shape("kvq_decode_seconds", "From the first token to the last.", _LATENCY_S),
        "prompt_tokens": Shape("kvq_request_prompt_tokens", "Of requests that succeeded.", _TOKENS),
        "generated_tokens": Shape("kvq_request_generated_tokens", "Of requests that succeeded.", _TOKENS),
        "hit_ratio": Shape(
            "kvq_request_prefix_hit_ratio",
            "Prompt tokens found in the prefix index / prompt tokens.",
            _RATIOS,
        ),
    },
    totals=(
        ("restarts", Called("kvq_engine_restarts", "Restarts of the engine.")),
        ("preemptions", Called("kvq_preemptions", "Requests that gave up their blocks.")),
        ("prompt_tokens", Called("kvq_prompt_tokens", "Of admitted requests.")),
        ("cached_tokens", Called("kvq_prompt_tokens_cached", "Of these, found in the prefix index.")),
        ("generated_tokens", Called("kvq_tokens_generated", "Tokens generated.")),
        ("evictions", Called("kvq_evictions", "Blocks that left the prefix index.")),
        ("refused_pins", Called("kvq_pins_refused", "Pins left out since there was no room for more.")),
        ("kv_events", Called("kvq_kv_events", "Blocks that routers were told of, entering or leaving.")),
        ("dropped_kv_events", Called("kvq_kv_events_dropped", "Told of later, with all others: no room.")),
        ("drafts", Called("kvq_drafts", "Times that tokens of a sequence were drafted.")),
        ("drafted_tokens", Called("kvq_tokens_drafted", "Tokens guessed by speculation.")),
        ("accepted_tokens", Called("kvq_tokens_accepted", "Of these, what the model would have said.")),
        ("recomputed_tokens", Called("kvq_recomputed_tokens", "Computed again after preemptions.")),
        ("swapped_blocks", Called("kvq_swapped_blocks", "Moved to host memory.")),
    ),
    gauges={
        "version": Called("kvq_build_info", "Of this server.", ("version",)),
        "is_ready": Called("kvq_engine_ready", "1 while the engine takes requests."),
        "engine": Called(
            "kvq_engine_info",
            "What the engine runs; formats of several layer groups are joined by commas.",
            ("model", "kv", "block_size", "max_context", "max_num_seqs"),
        ),
        "requests": Called("kvq_engine_requests", "Requests at the engine.", ("state",)),
        "depth": Called("kvq_queue_depth", "Requests at the engine without blocks."),
        "queued_tokens": Called("kvq_queued_prompt_tokens", "Of requests that wait."),
        "blocks": Called("kvq_blocks", "Blocks of the pools.", ("group", "state")),
        "pinned": Called("kvq_blocks_pinned", "Live blocks under a pin.", ("group",)),
        "pool_bytes": Called("kvq_pool_bytes", "The pools' sizes.", ("group", "kv")),
        "kv_bytes": Called("kvq_kv_bytes", "The pools' bytes by format.", ("kv", "state")),
        "memory": Called(
            "kvq_engine_memory_bytes", "Held by the engine process, weights and pools included.", ("device",)
        ),
    },
    block_times={
        "lifetime": Called("kvq_block_lifetime_seconds", "From entering the prefix index to leaving it."),
        "idle": Called(
            "kvq_block_idle_before_evict_seconds",
            "From entering the prefix index, or being found there for the last time, to leaving it.",
        ),
        "reuse_gap": Called("kvq_block_reuse_gap_seconds", "Between uses of an indexed block by sequences."),
    },
)

_VLLM_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_VLLM_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_VLLM_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# vLLM's names, labels and buckets, for dashboards made for it, and for the Gateway API's inference extension.
# Tokens, not blocks, are what `prefix_cache_queries` and `_hits` count. Sources: vllm/v1/metrics/loggers.py;
# docs/proposals/003-model-server-protocol of kubernetes-sigs/gateway-api-inference-extension.
VLLM = Names(
    ends=Called("vllm:request_success", "Results that ended, by how.", ("finished_reason",)),
    endings={"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"},
    observed={
        "ttft": Shape("vllm:time_to_first_token_seconds", "Time to the first token.", _VLLM_TTFT_S),
        "itl": Shape("vllm:inter_token_latency_seconds", "Between neighbouring tokens.", _VLLM_ITL_S),
        "e2e": Shape("vllm:e2e_request_latency_seconds", "Latency of whole requests.", _VLLM_LATENCY_S),
        "queue": Shape("vllm:request_queue_time_seconds", "Time in the queue.", _VLLM_LATENCY_S),
        "prefill": Shape("vllm:request_prefill_time_seconds", "Time in prefill.", _VLLM_LATENCY_S),
        "decode": Shape("vllm:request_decode_time_seconds", "Time in decode.", _VLLM_LATENCY_S),
        "prompt_tokens": Shape("vllm:request_prompt_tokens", "Prompt tokens of requests.", _TOKENS),
        "generated_tokens": Shape("vllm:request_generation_tokens", "Generated tokens of requests.", _TOKENS),
    },
    totals=(
        ("prompt_tokens", Called("vllm:prompt_tokens", "Prompt tokens of admitted requests.")),
        ("cached_tokens", Called("vllm:prompt_tokens_cached", "Of these, found in the prefix index.")),
        ("generated_tokens", Called("vllm:generation_tokens", "Tokens generated.")),
        ("preemptions", Called("vllm:num_preemptions", "Preemptions.")),
        ("prompt_tokens", Called("vllm:prefix_cache_queries", "Tokens looked up in the prefix index.")),
        ("cached_tokens", Called("vllm:prefix_cache_hits", "Tokens found in the prefix index.")),
        ("drafts", Called("vllm:spec_decode_num_drafts", "Times that tokens were drafted.")),
        ("drafted_tokens", Called("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")),
        ("accepted_tokens", Called("vllm:spec_decode_num_accepted_tokens", "Of these, accepted.")),
    ),
    gauges={
        "running": Called("vllm:num_requests_running", "Requests with blocks."),
        "depth": Called("vllm:num_requests_waiting", "Requests without."),
        "kv_use": Called("vllm:kv_cache_usage_perc", "Of the pools' bytes, in live blocks; 1 is all."),
        "cache": Called(
            "vllm:cache_config_info", "Of the first layer group's pool.", ("block_size", "num_gpu_blocks")
        ),
    },
    block_times={
        "lifetime": Called("vllm:kv_block_lifetime_seconds", "Of indexed blocks."),
        "idle": Called("vllm:kv_block_idle_before_evict_seconds", "From a block's last use to its eviction."),
        "reuse_gap": Called("vllm:kv_block_reuse_gap_seconds", "Between uses of a block."),
    },
    labels={"model_name": None, "engine": "0"},
)

# Plain names, as many small servers have them.
LLM = Names(
    ends=Called("llm_requests", "Requests that ended, by how.", ("model", "status")),
    endings=KVQ.endings,
    observed={
        "ttft": Shape("llm_ttft_seconds", "Time to the first token.", (0.1, 0.2, 0.5, 1, 2, 5, 10)),
        "e2e": Shape("llm_request_latency_seconds", "Latency of whole requests.", (0.5, 1, 2, 5, 10, 30, 60)),
    },
    totals=(("generated_tokens", Called("llm_tokens_generated", "Tokens generated.")),),
    gauges={
        "gpu_memory": Called("llm_gpu_memory_bytes", "Reserved on a GPU.", ("gpu_id",)),
        "running": Called("llm_active_requests", "Requests with blocks."),
        "depth": Called("llm_queue_depth", "Requests without."),
        "kv_use": Called("llm_kv_cache_utilization", "Of the pools' bytes, in live blocks."),
    },
)

ALL_NAMES = {"kvq": KVQ, "vllm": VLLM, "llm": LLM}


def parse_names(given: Iterable[str]) -> tuple[str, ...]:
    """Kinds of names from options, each a kind or several with commas; `kvq` is always there.

    Raises:
        ConfigError: no such kind.
    """
    asked = {"kvq"} | {part.strip() for text in given for part in text.split(",") if part.strip()}
    for name in sorted(asked - set(ALL_NAMES)):
        raise ConfigError(
            f"metrics go by the names of {', '.join(ALL_NAMES)}, got {name!r}{nearest(name, list(ALL_NAMES))}"
        )
    return tuple(name for name in ALL_NAMES if name in asked)
