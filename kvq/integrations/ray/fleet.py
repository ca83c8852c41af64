"""Fleet: the number of replicas, their resources and their router."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvq.capacity.fleet.routing import LONG_MATCH, MOST_AHEAD, REMEMBERED_TOKENS, Routing
from kvq.errors import ConfigError, not_one_of

ROUTERS = {  # name in `kvq simulate --routing` -> router class
    Routing.AFFINITY.value: "kvq.integrations.ray.router.PrefixRouter",
    Routing.TWO_CHOICES.value: "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter",
    Routing.ROUND_ROBIN.value: "ray.serve.experimental.round_robin_router.RoundRobinRouter",
}
_TOKEN_CHARS = 4  # approximate characters per token of text
# Options of Ray's prefix router. Ray's own defaults ignore the load, and keep every prompt forever.
_AFFINITY = {
    "imbalanced_threshold": MOST_AHEAD,
    "match_rate_threshold": LONG_MATCH,
    "do_eviction": True,
    "eviction_threshold_chars": REMEMBERED_TOKENS * _TOKEN_CHARS,
    "eviction_target_chars": REMEMBERED_TOKENS * _TOKEN_CHARS * 9 // 10,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Options for the replicas and their router."""

    num_replicas: int = 1
    max_replicas: int | None = None  # limit for autoscaling while requests wait; None: no autoscaling
    autoscaling: Mapping[str, Any] = field(default_factory=dict)  # Ray's options: upscale_delay_s, ...
    router: str = "affinity"
    router_options: Mapping[str, Any] = field(default_factory=dict)  # override the options set here
    num_ingresses: int = 1  # processes that forward requests
    ray_actor_options: Mapping[str, Any] = field(default_factory=dict)  # per replica: num_cpus, num_gpus

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ConfigError(not_one_of("router", self.router, ROUTERS))
        if self.num_replicas < 1 or self.num_ingresses < 1:
            raise ConfigError(
                f"num_replicas and num_ingresses must be at least 1, got {self.num_replicas} and "
                f"{self.num_ingresses}"
            )
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(
                f"max_replicas {self.max_replicas} is below num_replicas {self.num_replicas}; raise it"
            )

    @property
    def router_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the router's class."""
        return {**(_AFFINITY if self.router == "affinity" else {}), **self.router_options}
