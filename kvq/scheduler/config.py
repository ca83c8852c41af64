"""Scheduler configuration: step limits and latency goals."""

from dataclasses import dataclass

from kvq.errors import ConfigError

MAX_ADAPTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Step limits and latency goals; times are in seconds on the caller's clock."""

    max_num_seqs: int = 256  # sequences that run at the same time
    max_num_batched_tokens: int = 2048  # new tokens per step, including decodes
    max_context: int = 1 << 20  # tokens of one sequence
    max_adapters: int = MAX_ADAPTERS  # of the requests that run at the same time
    prefix_caching: bool = True
    max_step_stretch: float = 1.7  # time of a step with prefill and streams / a step without prefill
    min_chunk: int = 4  # minimum prefill tokens of a step, even if they are slow
    aging_s: float = 10.0  # after this wait, a batch request counts as interactive
    itl_slo_s: float | None = None  # limit for the time of a step; also limits the batch
    ttft_slo_s: float | None = None  # if at risk, prefill gets a larger share of steps

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_context", "max_adapters", "min_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs, since every running sequence adds a "
                f"token to a step, got {self.max_num_batched_tokens} and {self.max_num_seqs}"
            )
        if self.max_step_stretch <= 1:
            raise ConfigError(f"max_step_stretch must be above 1, got {self.max_step_stretch}")
        for name in ("aging_s", "itl_slo_s", "ttft_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {value}")
