"""Engine configuration: limits and goals, fixed when an engine is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from kvq.blockmgr.states import SNAPSHOT_EVERY
from kvq.engine.requests.marking import check_marking
from kvq.engine.speculation_config import Speculation, parse_speculation
from kvq.errors import ConfigError, not_one_of
from kvq.models.describe.pooling import CHOICES
from kvq.scheduler.config import MAX_ADAPTERS
from kvq.sizes import parse_bytes
from kvq.sizing.pools import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, RESERVE_FRACTION


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits and goals of an engine, fixed when the engine is built. No allocation grows later.

    The pool has `num_blocks` blocks, or `kv_memory` bytes ("2GiB"), or what remains of `memory_fraction` of
    the device's free memory after activations; of all that, it takes `kv_share`. `max_context`: context limit
    in tokens, if below the model's own. `async_scheduling`: plan and launch a step while the previous one
    runs or is processed; by default, enabled on GPUs, where launching takes time, and on CPUs if steps are
    short. `adapters`: PEFT folders of LoRA adapters by the names that requests give; at most `max_adapters`
    of them are in memory.
    `kv_host`, `kv_disk`: bytes in host memory and in the folder `kv_dir` for blocks that leave the pool, of
    preempted requests, too. `kv_tier_format`: format of fewer bits in which they are kept there, such as
    "int4". `kv_key_file`: a secret key that encrypts the folder. `kv_max_age_s`: time after which unused
    blocks are dropped there. `kv_tenant_share`: largest share of one tenant.
    `kv_ladder`: formats of fewer bits, such as ("int4", "int3"), in which blocks that nobody reads stay in
    the pool before they leave it. `kv_cold_share`: largest share of a prompt that may have been in them.
    `hand_over_listen`, `hand_over_to`: a port of loopback, HOST:PORT or unix:PATH at which prefixes and
    requests of other engines arrive, and to which they go; `hand_over_key_file`: a secret that both engines
    know. `hand_over_prefilled`: whether requests go once their prompt is computed.
    `guard`: share of requests that are computed again without quantized KV when there is time, each up to
    `guard_tokens` tokens, and compared with what was served.
    `speculation`: how tokens are drafted, as a `kvq.engine.speculation_config.Speculation` or a mapping of
    its fields, such as {"method": "ngram", "k": 4}.
    `pooling`: what embeddings and scores are computed from: "auto" (as the model's files say), the hidden
    state of the "last" or "first" token, their "mean", or the logits of "yes-no".
    `watermark`: which texts are marked, with `watermark_scheme` and the secret in `watermark_key_file`: none
    ("off"), those requested ("asked"), all except declined ones ("unless-declined"), or all ("always").
    """

    max_num_seqs: int = MAX_NUM_SEQS  # sequences that run at the same time
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS  # new tokens of a step; at least max_num_seqs
    max_context: int | None = None
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    max_adapters: int = MAX_ADAPTERS
    num_blocks: int | None = None  # per layer group
    kv_memory: int | str | None = None
    memory_fraction: float | None = None  # default: 0.9 on a GPU; on a CPU 0.5, but at most 4 GiB
    kv_share: float = 1.0
    kv_host: int | str = 0
    kv_disk: int | str = 0
    kv_dir: str | Path | None = None
    kv_key_file: str | Path | None = None
    kv_max_age_s: float | None = None
    kv_tenant_share: float = 1.0
    kv_tier_format: str | None = None  # D407
    kv_ladder: Sequence[str] | str = ()
    kv_cold_share: float = 1.0
    hand_over_listen: str | None = None
    hand_over_to: str | None = None
    hand_over_key_file: str | Path | None = None
    hand_over_prefilled: bool = False
    guard: float = 0.0
    guard_tokens: int = 2048
    prefix_caching: bool = True
    snapshot_every: int = SNAPSHOT_EVERY  # tokens between recurrent states kept for prefix caching
    reserve_fraction: float = RESERVE_FRACTION
    aging_s: float = 10.0
    itl_slo_s: float | None = None
    ttft_slo_s: float | None = None
    max_step_stretch: float = 1.7
    async_scheduling: bool | None = None
    step_deadline_s: float = 120.0  # a step that takes longer is reported as stuck
    speculation: Speculation | Mapping[str, Any] | str | None = None  # None: no drafts
    accept_divergence: bool = False  # use a KV format although the load check finds that it breaks the model
    pooling: str = "auto"  # one of kvq.models.describe.pooling.CHOICES
    watermark: str = "off"
    watermark_key_file: str | Path | None = None
    watermark_scheme: str = "green"  # as accepted by `parse_scheme`: "green,delta=3"

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculation", parse_speculation(self.speculation))
        for name in ("max_num_seqs", "max_num_batched_tokens", "snapshot_every", "guard_tokens"):
            _check(name, getattr(self, name), 1, 1 << 24)
        _check("max_adapters", self.max_adapters, 1, 1 << 24)
        for name in ("num_blocks", "max_context"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 1, 1 << 31)
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ConfigError(
                "num_blocks (--num-blocks) and kv_memory (--kv-memory) both size the pool; give one of them"
            )
        for name in ("prefix_caching", "async_scheduling", "accept_divergence", "hand_over_prefilled"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("reserve_fraction", "aging_s", "max_step_stretch", "step_deadline_s"):
            _check_number(name, getattr(self, name))
        for name in ("memory_fraction", "itl_slo_s", "ttft_slo_s"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name))
        for name in ("itl_slo_s", "ttft_slo_s"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        _check_number("kv_share", self.kv_share)
        if not 0 < self.kv_share <= 1:
            raise ConfigError(f"kv_share must be above 0 and at most 1, got {self.kv_share}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction}")
        _check_number("guard", self.guard)
        if not 0 <= self.guard <= 1:
            raise ConfigError(f"guard (--guard) is a share of requests, 0 to 1, got {self.guard}")
        if not 0 <= self.reserve_fraction < 1:
            raise ConfigError(f"reserve_fraction must be 0 to below 1, got {self.reserve_fraction}")
        if not self.step_deadline_s > 0:
            raise ConfigError(f"step_deadline_s must be above 0 seconds, got {self.step_deadline_s}")
        if self.pooling not in CHOICES:
            raise ConfigError(not_one_of("pooling (--pooling)", self.pooling, CHOICES))
        _check_tiers(self)
        check_marking(self.watermark, self.watermark_scheme, self.watermark_key_file)


def _check(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number of {low} to {high}, got {value!r}")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")


def _check_tiers(config: EngineConfig) -> None:
    """Raise ConfigError unless the options of tiers are within range and fit together."""
    host, disk = parse_bytes(config.kv_host, "kv_host"), parse_bytes(config.kv_disk, "kv_disk")
    if bool(disk) != (config.kv_dir is not None):
        raise ConfigError(
            f"kv_disk (--kv-disk) and kv_dir (--kv-dir) belong together, a size such as '100GiB' and a "
            f"folder; got {config.kv_disk!r} and {config.kv_dir!r}"
        )
    if (host or disk) and not config.prefix_caching:
        raise ConfigError("kv_host and kv_disk keep prefixes, so they need prefix_caching")
    if config.kv_key_file is not None and not disk:
        raise ConfigError("kv_key_file (--kv-key-file) encrypts kv_dir (--kv-dir); give both, or no key")
    if config.kv_tier_format is not None and not (host or disk):
        raise ConfigError(
            "kv_tier_format (--kv-tier-format) is the format in kv_host (--kv-host) and kv_dir (--kv-dir); "
            "give one of them"
        )
    ladder = config.kv_ladder
    names = ladder.split(",") if isinstance(ladder, str) else ladder
    are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not are_names or (ladder and not any(name.strip() for name in names)):
        raise ConfigError(
            f"kv_ladder (--kv-ladder) must name formats of fewer bits, such as 'int4,int3', got {ladder!r}"
        )
    if ladder and not config.prefix_caching:
        raise ConfigError("kv_ladder (--kv-ladder) keeps prefixes, so it needs prefix_caching")
    cold = config.kv_cold_share
    if not (isinstance(cold, int | float) and 0 <= cold <= 1):
        raise ConfigError(f"kv_cold_share (--kv-cold-share) must be 0 to 1, got {cold!r}")
    age, share = config.kv_max_age_s, config.kv_tenant_share
    if age is not None and not (isinstance(age, int | float) and isfinite(age) and age > 0):
        raise ConfigError(f"kv_max_age_s (--kv-max-age) must be above 0 seconds, got {age!r}")
    if not (isinstance(share, int | float) and 0 < share <= 1):
        raise ConfigError(f"kv_tenant_share (--kv-tenant-share) must be above 0 and at most 1, got {share!r}")
    if (age is not None or share != 1) and not (host or disk):
        raise ConfigError(
            "kv_max_age_s (--kv-max-age) and kv_tenant_share (--kv-tenant-share) bound what is kept in "
            "kv_host (--kv-host) and kv_dir (--kv-dir); give one of these, too"
        )
    if config.hand_over_prefilled and config.hand_over_to is None:
        raise ConfigError(
            "hand_over_prefilled (--hand-over-prefilled) needs an engine to go to; give hand_over_to "
            "(--hand-over-to)"
        )
