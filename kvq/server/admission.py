"""Who is let in: what the pools and the queue can bear, decided before any work is done."""

import random
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

from kvq.engine import SamplingParams
from kvq.errors import ConfigError, RequestError
from kvq.scheduler import Request, resolve_max_tokens, worst_case
from kvq.server.messages import Gauges, Ready
from kvq.server.problems import Problem, unavailable
from kvq.server.tenants import Tenant, TenantLimits

_RATE_WINDOW_S = 10.0
_MIN_STARTS = 16  # first tokens within the window, below which no rate is believed
_MAX_RETRY_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionConfig:
    """How much may wait. Load is the largest of the four shares of what waits in what may."""

    max_queue: int = 1024  # requests
    max_queued_tokens: int = 1 << 20  # of their prompts
    max_wait_s: float = 30.0  # for the first token, as lately observed
    max_overcommit: float = 16.0  # worst-case blocks of all requests / blocks of the pool
    shed_above: float = 0.8  # load at which requests begin to be refused at random
    max_kv_pressure: float = 0.95  # live blocks / blocks

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_queued_tokens", "max_wait_s", "max_overcommit"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("shed_above", "max_kv_pressure"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")


@dataclass(slots=True, eq=False)
class Queued:
    """One prompt on its way to its first token, and what it may need in the end."""

    prompt_tokens: int
    share: float  # worst-case blocks / blocks of the pool
    has_started: bool = False


@dataclass(slots=True)
class _Rate:
    """First tokens a second, while requests wait for them."""

    clock: Callable[[], float]
    starts: deque[float] = field(default_factory=deque)

    def note(self) -> None:
        self.starts.append(self.clock())
        self._forget()

    def per_s(self) -> float | None:
        self._forget()
        if len(self.starts) < _MIN_STARTS:
            return None
        return len(self.starts) / max(self.clock() - self.starts[0], 1e-3)

    def _forget(self) -> None:
        now = self.clock()
        while self.starts and now - self.starts[0] > _RATE_WINDOW_S:
            self.starts.popleft()


class Admission:
    """Counts what waits and what runs, and refuses what is too much.

    400: can never fit. 429: the tenant's own limit. 503: the server's, with the seconds to wait.
    `gauges` tells where the engine stood after its last step, None while there is no engine;
    `tokenizing` how many prompts are on their way to it.
    """

    def __init__(
        self,
        config: AdmissionConfig | None = None,
        limits: TenantLimits | None = None,
        *,
        gauges: Callable[[], Gauges | None] = lambda: None,
        tokenizing: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.config = config or AdmissionConfig()
        self._limits = limits or TenantLimits()
        self._clock = clock
        self._chance = chance
        self._rate = _Rate(clock)
        self._tenants: defaultdict[str, Tenant] = defaultdict(lambda: Tenant(self._limits, clock))
        self._queued: set[Queued] = set()
        self._waiting_tokens = 0
        self._overcommit = 0.0
        self._gauges = gauges
        self._tokenizing = tokenizing

    @property
    def num_waiting(self) -> int:
        """Requests without blocks, as far as is known here."""
        gauges = self._gauges()
        running = 0 if gauges is None else gauges.running
        return self._tokenizing() + max(0, len(self._queued) - running)

    @property
    def expected_wait_s(self) -> float:
        """What a new request would wait for its first token; 0 where too little is known."""
        per_s = self._rate.per_s()
        return 0.0 if per_s is None else self.num_waiting / per_s

    @property
    def kv_pressure(self) -> float:
        """Live blocks / blocks of the fullest pool."""
        gauges = self._gauges()
        pools = [] if gauges is None else gauges.pools
        return max((pool.live / pool.total for pool in pools), default=0.0)

    @property
    def load(self) -> float:
        """0 idle, 1 full."""
        waiting = self.num_waiting
        if not waiting:
            return 0.0
        config = self.config
        return max(
            waiting / config.max_queue,
            self._waiting_tokens / config.max_queued_tokens,
            self.expected_wait_s / config.max_wait_s,
            self._overcommit / config.max_overcommit,
        )

    def check(self, tenant: str) -> None:
        """Whether a request of a tenant is refused in any case; asked before its body is read.

        Raises:
            Problem: 429 or 503, with the seconds after which another try may succeed.
        """
        self._tenants[tenant].check()
        self._check_bounds(self.load)

    @contextmanager
    def enter(self, tenant: str, sequences: int = 1) -> Iterator[None]:
        """One request of a tenant for so many sequences, from its arrival to its end.

        Raises:
            Problem: 400 if the tenant may never have so many, 429 or 503, with the seconds to wait.
        """
        who = self._tenants[tenant]
        who.check(sequences)
        self._check_load()
        with who.active(sequences):
            yield

    @contextmanager
    def enter_aside(self, tenant: str) -> Iterator[None]:
        """One request of a tenant that the engine does not see.

        Raises:
            Problem: 429, with the seconds to wait.
        """
        who = self._tenants[tenant]
        who.check()
        with who.active():
            yield

    @contextmanager
    def queue(self, tokens: list[int], params: SamplingParams, info: Ready) -> Iterator[Queued]:
        """One prompt at the engine, from now to its end.

        Raises:
            Problem: 400 if it can never fit, 503 if too much waits already.
        """
        entry = self._measure(tokens, params, info)
        config = self.config
        if self._queued:  # alone, whatever fits is served
            if self.num_waiting >= config.max_queue:
                raise self._overloaded(f"{self.num_waiting} requests wait already")
            if self._waiting_tokens + entry.prompt_tokens > config.max_queued_tokens:
                raise self._overloaded(f"{self._waiting_tokens} prompt tokens wait already")
            if self._overcommit + entry.share > config.max_overcommit:
                raise self._overloaded("the requests at hand may need all that the pool can promise")
        self._queued.add(entry)
        self._waiting_tokens += entry.prompt_tokens
        self._overcommit += entry.share
        try:
            yield entry
        finally:
            self._begin(entry)
            self._queued.discard(entry)
            self._overcommit = self._overcommit - entry.share if self._queued else 0.0

    def check_fits(self, tokens: list[int], params: SamplingParams, info: Ready) -> None:
        """Raise Problem, with 400, if a prompt can never fit."""
        self._measure(tokens, params, info)

    def started(self, entry: Queued) -> None:
        """It has its first token."""
        if self._begin(entry):
            self._rate.note()

    def _begin(self, entry: Queued) -> bool:
        if entry.has_started:
            return False
        entry.has_started = True
        self._waiting_tokens -= entry.prompt_tokens
        return True

    def charge(self, tenant: str, tokens: int) -> None:
        """Count what a tenant's request used."""
        if tenant in self._tenants:
            self._tenants[tenant].charge(tokens)

    def _check_load(self) -> None:
        load, config = self.load, self.config
        self._check_bounds(load)
        if load > config.shed_above and self._chance() < (load - config.shed_above) / (1 - config.shed_above):
            raise self._overloaded(f"the queue is at {load:.0%} of what it may hold")

    def _check_bounds(self, load: float) -> None:
        pressure, config = self.kv_pressure, self.config
        if pressure > config.max_kv_pressure:
            raise self._overloaded(f"{pressure:.0%} of the KV pool are in use")
        if load >= 1:
            raise self._overloaded(f"{self.num_waiting} requests wait already")

    def _overloaded(self, message: str) -> Problem:
        wait_s = min(max(1, ceil(self.expected_wait_s)), _MAX_RETRY_S)
        return unavailable(f"the server is overloaded: {message}; try again later", retry_after_s=wait_s)

    def _measure(self, tokens: list[int], params: SamplingParams, info: Ready) -> Queued:
        request = Request(
            id="",
            tokens=array("I", tokens),
            max_tokens=params.max_tokens,
            num_branches=params.num_sequences,
        )
        try:
            most = resolve_max_tokens(request, info.shape, info.scheduler)
        except RequestError as error:
            is_long = len(tokens) + (params.max_tokens or 1) > info.max_context
            raise Problem(400, str(error), code="context_length_exceeded" if is_long else None) from error
        need = worst_case(request, most, info.shape, info.scheduler.max_num_batched_tokens)
        shares = [blocks / total for blocks, total in zip(need, info.shape.num_blocks, strict=True)]
        return Queued(len(tokens), max(shares))
