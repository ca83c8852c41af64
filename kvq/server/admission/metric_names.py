"""Names of metrics: kvq's native names, and the names used by common dashboards."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvq.errors import ConfigError, not_one_of


class _Named(NamedTuple):
    """Name, help text and labels of a metric, and its buckets if it is a histogram."""

    name: str
    text: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Names:
    """Naming scheme: the names of all metrics, under the same keys as the values in `Metrics`.

    `endings`: maps a request's outcome (success, error, cancelled, or the reason for refusal) and a result's
    "stop" or "length" to a value of the last label of `ends`. Other outcomes are not counted.
    """

    ends: _Named  # any label before the last is the model's name
    endings: Mapping[str, str]
    observed: Mapping[str, _Named]
    totals: Sequence[tuple[str, _Named]]
    gauges: Mapping[str, _Named]
    misses: _Named | None = None  # prefix misses, by cause
    block_times: Mapping[str, _Named] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)  # of all metrics; None: the model's name


_TOKENS = tuple(10.0**power * digit for power in range(7) for digit in (1, 2, 5))[:-1]  # up to 2 million
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_LATENCY_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_RATIOS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_STATUSES = ("success", "error", "cancelled", "timeout", "invalid", "limited", "refused")

KVQ = Names(
    ends=_Named("kvq_requests", "Requests that ended, by status.", labels=("status",)),
    endings={status: status for status in _STATUSES},
    observed={
        "ttft": _Named("kvq_ttft_seconds", "Time from arrival at the engine to the first token.", _TTFT_S),
        "itl": _Named("kvq_itl_seconds", "Time between neighbouring tokens of a request.", _ITL_S),
        "e2e": _Named(
            "kvq_request_latency_seconds", "Time from arrival at the engine to the last token.", _LATENCY_S
        ),
        "queue": _Named("kvq_queue_seconds", "Time from arrival at the engine to the first blocks.", _TTFT_S),
        "prefill": _Named("kvq_prefill_seconds", "Time from the first blocks to the first token.", _TTFT_S),
        "decode": _Named("kvq_decode_seconds", "Time from the first token to the last.", _LATENCY_S),
        "prompt_tokens": _Named(
            "kvq_request_prompt_tokens", "Prompt tokens of requests that succeeded.", _TOKENS
        ),
        "generated_tokens": _Named(
            "kvq_request_generated_tokens", "Generated tokens of requests that succeeded.", _TOKENS
        ),
        "hit_ratio": _Named(
            "kvq_request_prefix_hit_ratio",
            "Prompt tokens found in the prefix index / prompt tokens.",
            _RATIOS,
        ),
    },
    totals=(
        ("restarts", _Named("kvq_engine_restarts", "Restarts of the engine.")),
        ("preemptions", _Named("kvq_preemptions", "Requests that gave up their blocks.")),
        ("prompt_tokens", _Named("kvq_prompt_tokens", "Prompt tokens of admitted requests.")),
        ("cached_tokens", _Named("kvq_prompt_tokens_cached", "Prompt tokens found in the prefix index.")),
        ("generated_tokens", _Named("kvq_tokens_generated", "Tokens generated.")),
        ("evictions", _Named("kvq_evictions", "Blocks that left the prefix index.")),
        ("refused_pins", _Named("kvq_pins_refused", "Pins refused because there was no room.")),
        ("kv_events", _Named("kvq_kv_events", "Block events sent to routers.")),
        (
            "dropped_kv_events",
            _Named(
                "kvq_kv_events_dropped", "Block events without room, whose blocks were reported again later."
            ),
        ),
        ("drafts", _Named("kvq_drafts", "Number of times that tokens of a sequence were drafted.")),
        ("drafted_tokens", _Named("kvq_tokens_drafted", "Tokens guessed by speculation.")),
        ("accepted_tokens", _Named("kvq_tokens_accepted", "Drafted tokens that the model accepted.")),
        ("recomputed_tokens", _Named("kvq_recomputed_tokens", "Tokens computed again after preemptions.")),
        ("restored_tokens", _Named("kvq_restored_tokens", "Tokens brought back after preemptions.")),
        (
            "host_tokens",
            _Named("kvq_prompt_tokens_from_host", "Cached tokens from host memory."),
        ),
        ("disk_tokens", _Named("kvq_prompt_tokens_from_disk", "Cached tokens from the disk.")),
        (
            "cold_tokens",
            _Named("kvq_prompt_tokens_cold", "Cached tokens that were in fewer bits."),
        ),
        ("packed_blocks", _Named("kvq_packed_blocks", "Blocks rewritten in fewer bits.")),
        (
            "dropped_blocks",
            _Named("kvq_tier_blocks_dropped", "Evicted blocks that were not kept."),
        ),
        (
            "damaged_blocks",
            _Named("kvq_tier_blocks_damaged", "Damaged blocks or parts of files."),
        ),
        (
            "prefetched_sessions",
            _Named("kvq_sessions_prefetched", "Sessions brought back in advance."),
        ),
        ("guard_requests", _Named("kvq_guard_requests", "Requests computed again without quantized KV.")),
        ("guard_tokens", _Named("kvq_guard_tokens", "Their tokens whose predictions were compared.")),
        ("guard_same", _Named("kvq_guard_tokens_same", "Of them, those with the same likeliest token.")),
        ("guard_alerts", _Named("kvq_guard_alerts", "Layers with wrong scales, and rising divergence.")),
    ),
    misses=_Named(
        "kvq_prefix_misses",
        "Requests whose prompt left the prefix index before its end, by cause.",
        labels=("cause",),
    ),
    gauges={
        "version": _Named("kvq_build_info", "Version of this server.", labels=("version",)),
        "is_ready": _Named("kvq_engine_ready", "1 while the engine takes requests."),
        "engine": _Named(
            "kvq_engine_info",
            "Configuration of the engine; formats of several layer groups are joined by commas.",
            labels=("model", "kv", "block_size", "max_context", "max_num_seqs"),
        ),
        "requests": _Named("kvq_engine_requests", "Requests at the engine.", labels=("state",)),
        "depth": _Named("kvq_queue_depth", "Requests at the engine without blocks."),
        "queued_tokens": _Named("kvq_queued_prompt_tokens", "Prompt tokens of requests that wait."),
        "blocks": _Named("kvq_blocks", "Blocks of the pools.", labels=("group", "state")),
        "pinned": _Named("kvq_blocks_pinned", "Live blocks under a pin.", labels=("group",)),
        "pool_bytes": _Named("kvq_pool_bytes", "Size of each pool.", labels=("group", "kv")),
        "kv_bytes": _Named("kvq_kv_bytes", "Bytes of the pools by format.", labels=("kv", "state")),
        "tier_bytes": _Named("kvq_tier_bytes", "KV in host memory and on disk.", labels=("tier",)),
        "guard_fallback": _Named(
            "kvq_guard_fallback", "1 once new requests go to the format of --guard-fallback."
        ),
        "formats": _Named(
            "kvq_format",
            "Requests so far, running and waiting, live blocks and all blocks of each format.",
            labels=("kv_format", "what"),
        ),
        "guard_kl": _Named(
            "kvq_guard_kl_nats",
            "Mean KL divergence from unquantized KV, by the least depth in tokens.",
            labels=("depth",),
        ),
        "memory": _Named(
            "kvq_engine_memory_bytes",
            "Memory of the engine process, including weights and pools.",
            labels=("device",),
        ),
    },
    block_times={
        "lifetime": _Named(
            "kvq_block_lifetime_seconds", "Time from entering the prefix index to leaving it."
        ),
        "idle": _Named(
            "kvq_block_idle_before_evict_seconds",
            "Time from a block's last use in the prefix index, or its entry, to leaving it.",
        ),
        "reuse_gap": _Named(
            "kvq_block_reuse_gap_seconds", "Time between uses of an indexed block by sequences."
        ),
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
# `prefix_cache_queries` and `_hits` count tokens, not blocks. Sources: vllm/v1/metrics/loggers.py;
# docs/proposals/003-model-server-protocol of kubernetes-sigs/gateway-api-inference-extension.
VLLM = Names(
    ends=_Named("vllm:request_success", "Results that ended, by reason.", labels=("finished_reason",)),
    endings={"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"},
    observed={
        "ttft": _Named("vllm:time_to_first_token_seconds", "Time to the first token.", _VLLM_TTFT_S),
        "itl": _Named("vllm:inter_token_latency_seconds", "Time between neighbouring tokens.", _VLLM_ITL_S),
        "e2e": _Named("vllm:e2e_request_latency_seconds", "Latency of whole requests.", _VLLM_LATENCY_S),
        "queue": _Named("vllm:request_queue_time_seconds", "Time in the queue.", _VLLM_LATENCY_S),
        "prefill": _Named("vllm:request_prefill_time_seconds", "Time in prefill.", _VLLM_LATENCY_S),
        "decode": _Named("vllm:request_decode_time_seconds", "Time in decode.", _VLLM_LATENCY_S),
        "prompt_tokens": _Named("vllm:request_prompt_tokens", "Prompt tokens of requests.", _TOKENS),
        "generated_tokens": _Named(
            "vllm:request_generation_tokens", "Generated tokens of requests.", _TOKENS
        ),
    },
    totals=(
        ("prompt_tokens", _Named("vllm:prompt_tokens", "Prompt tokens of admitted requests.")),
        ("cached_tokens", _Named("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix index.")),
        ("generated_tokens", _Named("vllm:generation_tokens", "Tokens generated.")),
        ("preemptions", _Named("vllm:num_preemptions", "Preemptions.")),
        ("prompt_tokens", _Named("vllm:prefix_cache_queries", "Tokens looked up in the prefix index.")),
        ("cached_tokens", _Named("vllm:prefix_cache_hits", "Tokens found in the prefix index.")),
        ("drafts", _Named("vllm:spec_decode_num_drafts", "Number of times that tokens were drafted.")),
        ("drafted_tokens", _Named("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")),
        (
            "accepted_tokens",
            _Named("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."),
        ),
    ),
    gauges={
        "running": _Named("vllm:num_requests_running", "Requests with blocks."),
        "depth": _Named("vllm:num_requests_waiting", "Requests without blocks."),
        "kv_use": _Named("vllm:kv_cache_usage_perc", "Share of the pools' bytes in live blocks; 1 is all."),
        "cache": _Named(
            "vllm:cache_config_info",
            "Configuration of the first layer group's pool.",
            labels=("block_size", "num_gpu_blocks"),
        ),
    },
    block_times={
        "lifetime": _Named("vllm:kv_block_lifetime_seconds", "Lifetime of indexed blocks."),
        "idle": _Named(
            "vllm:kv_block_idle_before_evict_seconds", "Time from a block's last use to its eviction."
        ),
        "reuse_gap": _Named("vllm:kv_block_reuse_gap_seconds", "Time between uses of a block."),
    },
    labels={"model_name": None, "engine": "0"},
)

# Plain names, as in many small servers
LLM = Names(
    ends=_Named("llm_requests", "Requests that ended, by status.", labels=("model", "status")),
    endings=KVQ.endings,
    observed={
        "ttft": _Named("llm_ttft_seconds", "Time to the first token.", (0.1, 0.2, 0.5, 1, 2, 5, 10)),
        "e2e": _Named(
            "llm_request_latency_seconds", "Latency of whole requests.", (0.5, 1, 2, 5, 10, 30, 60)
        ),
    },
    totals=(("generated_tokens", _Named("llm_tokens_generated", "Tokens generated.")),),
    gauges={
        "gpu_memory": _Named("llm_gpu_memory_bytes", "Memory reserved on a GPU.", labels=("gpu_id",)),
        "running": _Named("llm_active_requests", "Requests with blocks."),
        "depth": _Named("llm_queue_depth", "Requests without blocks."),
        "kv_use": _Named("llm_kv_cache_utilization", "Share of the pools' bytes in live blocks."),
    },
)

ALL_NAMES = {"kvq": KVQ, "vllm": VLLM, "llm": LLM}


def parse_names(given: Iterable[str]) -> tuple[str, ...]:
    """Parse naming schemes from option values, each a comma-separated list; `kvq` is always included.

    Raises:
        ConfigError: a naming scheme is unknown.
    """
    wanted = {"kvq"} | {part.strip() for text in given for part in text.split(",") if part.strip()}
    for name in sorted(wanted - set(ALL_NAMES)):
        raise ConfigError(not_one_of("metrics names", name, ALL_NAMES))
    return tuple(name for name in ALL_NAMES if name in wanted)
