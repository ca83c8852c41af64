"""Admission control: limits on KV pools and the request queue, checked before any work is done."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from time import monotonic

from kvq.engine import SamplingParams
from kvq.engine.requests.outputs import Piece
from kvq.errors import EngineError, RequestError
from kvq.scheduler import most_blocks, resolve_max_tokens
from kvq.server.admission.prompts import Prompts
from kvq.server.admission.rate_limits import Tenant, TenantLimits
from kvq.server.admission.slots import EngineSlots, SequenceSlots
from kvq.server.engine.messages import Ended, Ready
from kvq.server.engine.remote import Remote
from kvq.server.http.problems import Overload, Problem

_MAX_RETRY_S = 60
_WINDOW_S = 10.0
_MIN_STARTS = 16  # minimum number of first tokens in the window for an estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionConfig:
    """Limits on waiting work. The load is the highest utilization of the first four limits."""

    max_queue: int = 1024  # requests without an engine slot
    max_queued_tokens: int = 1 << 20  # total tokens of prompts without a first token
    max_wait_s: float = 30.0  # expected wait for the first token
    max_overcommit: float = 16.0  # worst-case blocks of all requests / blocks of the pool
    # Above this share of any limit except `max_queue`, which is exact, requests that would have to wait for
    # a slot are refused at random
    shed_above: float = 0.8
    max_kv_pressure: float = 0.95  # live blocks / blocks


@dataclass(slots=True, eq=False)
class _Queued:
    """Prompt in the engine, with its worst-case block demand."""

    prompt_tokens: int
    share: float  # worst-case blocks / blocks of the pool
    slots: SequenceSlots  # slots of the request that the prompt belongs to
    left: int  # unfinished sequences
    tells: bool  # the first token is sent immediately; with best_of, results are sent only at the end
    has_started: bool = False


class Admission:
    """Admission controller: counts waiting and running requests, and refuses requests beyond the limits.

    Status 400: the request can never fit. 429: a limit of the tenant. 503: a limit of the server.
    """

    def __init__(
        self,
        config: AdmissionConfig | None = None,
        limits: TenantLimits | None = None,
        *,
        engine: Remote,
        prompts: Prompts,
        clock: Callable[[], float] = monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.config = config or AdmissionConfig()
        self._clock = clock
        self._chance = chance
        self._first_tokens = _FirstTokens(clock)
        self.tenants: defaultdict[str, Tenant] = defaultdict(lambda: Tenant(limits or TenantLimits(), clock))
        self._concurrency = EngineSlots(lambda: engine.num_slots)
        self._queued: set[_Queued] = set()
        self._waiting_tokens = 0
        self._overcommit = 0.0
        self._engine = engine
        self._prompts = prompts

    @property
    def num_waiting(self) -> int:
        """Number of requests without an engine slot, or of requests without blocks, whichever is larger."""
        gauges = self._engine.gauges
        return max(self._concurrency.num_waiting, 0 if gauges is None else gauges.held_up)

    @property
    def expected_wait_s(self) -> float:
        """Expected time to first token of a new request; 0 if there are too few measurements."""
        per_s = self._first_tokens.per_s()
        return 0.0 if per_s is None else (self._prompts.num_waiting + self._first_tokens.num_awaited) / per_s

    @property
    def kv_pressure(self) -> float:
        """Live blocks / total blocks of the fullest pool, excluding staging areas, which never fill up."""
        gauges, info = self._engine.gauges, self._engine.info
        if gauges is None:  # no step has ended yet
            return 0.0
        staging = [] if info is None else info.is_staging
        counted = (pool for pool, is_staging in zip_longest(gauges.pools, staging) if not is_staging)
        return max((pool.live / pool.total for pool in counted), default=0.0)

    @property
    def load(self) -> float:
        """Server load, from 0 (idle) to 1 (full)."""
        return max(self.num_waiting / self.config.max_queue, *self._estimates())

    def check(self, tenant: str) -> None:
        """Check, before the body is read, whether a tenant's request would be refused regardless of the body.

        Raises:
            Problem: 429 or 503, with the number of seconds after which a retry may succeed.
        """
        self.tenants[tenant].check()
        self._check_bounds()

    @contextmanager
    def enter(self, tenant: str, slots: SequenceSlots) -> Iterator[None]:
        """Admit a tenant's request, and count the slots of the request until it ends.

        Raises:
            Problem: 400 if the tenant may never run this many sequences; 429 or 503 with the seconds to wait.
        """
        limits, sequences = self.tenants[tenant], slots.coming
        limits.check(sequences)
        self._check_bounds()
        if not self._concurrency.has_room(slots):
            self._shed()
        self._concurrency.enter(slots)
        try:
            with limits.active(sequences):
                yield
        finally:
            self._concurrency.leave(slots)

    @contextmanager
    def queue(
        self, tokens: Sequence[int], params: SamplingParams, info: Ready, slots: SequenceSlots
    ) -> Iterator[_Queued]:
        """Count one prompt of a request from its submission to the engine until it ends.

        Raises:
            Problem: 400 if the prompt can never fit, 503 if too much work is waiting.
        """
        need = blocks_wanted(params, len(tokens), info)
        entry = _Queued(
            prompt_tokens=len(tokens),
            share=max(blocks / total for blocks, total in zip(need, info.shape.num_blocks, strict=True)),
            slots=slots,
            left=params.num_sequences,
            tells=params.best_of is None,
        )
        self._check_room(entry.prompt_tokens, entry.share)
        self._queued.add(entry)
        self._waiting_tokens += entry.prompt_tokens
        self._overcommit += entry.share
        if entry.tells:
            self._first_tokens.await_one()
        try:
            yield entry
        finally:
            self.ended(entry)

    def note(self, entry: _Queued, message: Piece | Ended | EngineError) -> None:
        """Record a prompt's progress."""
        if not isinstance(message, Piece):
            self.ended(entry)
            return
        self.started(entry)
        if message.finish_reason is not None:
            self.ended_one(entry)

    def started(self, entry: _Queued) -> None:
        """Record that a prompt has its first token."""
        if not entry.has_started:
            self._concurrency.begin(entry.slots, entry.left)
            self._wait_no_more(entry, started=True)

    def ended_one(self, entry: _Queued) -> None:
        """Record that one of a prompt's sequences ended."""
        self._end(entry, min(1, entry.left))

    def ended(self, entry: _Queued) -> None:
        """Record that a prompt ended, possibly before the client is notified. Further calls do nothing."""
        self._end(entry, entry.left)
        if not entry.has_started:
            self._wait_no_more(entry, started=False)
        if entry in self._queued:
            self._queued.remove(entry)
            self._overcommit = self._overcommit - entry.share if self._queued else 0.0

    def _wait_no_more(self, entry: _Queued, *, started: bool) -> None:
        entry.has_started = True
        self._waiting_tokens -= entry.prompt_tokens
        if entry.tells:
            self._first_tokens.leave(started=started)

    def _end(self, entry: _Queued, count: int) -> None:
        entry.left -= count
        self._concurrency.end(entry.slots, count, begun=entry.has_started)

    def _estimates(self) -> list[float]:
        """Return the estimated utilization of each limit by current requests."""
        config = self.config
        shares = [self._waiting_tokens / config.max_queued_tokens, self.expected_wait_s / config.max_wait_s]
        return [*shares, self._overcommit / config.max_overcommit] if self.num_waiting else shares

    def _check_bounds(self) -> None:
        pressure, waiting, config = self.kv_pressure, self.num_waiting, self.config
        if pressure > config.max_kv_pressure:
            raise self._overloaded(f"{pressure:.0%} of the KV pool are in use")
        if waiting >= config.max_queue:
            raise self._overloaded(f"{waiting} requests wait already")
        if (wait_s := self.expected_wait_s) >= config.max_wait_s:
            raise self._overloaded(f"a first token takes about {wait_s:.0f} s now")
        self._check_room(0, 0.0)

    def _check_room(self, tokens: int, share: float) -> None:
        """Raise Problem if `tokens` more prompt tokens, or `share` more of a pool, would exceed a limit."""
        if not self._queued:  # an idle server accepts any prompt that fits
            return
        if self._waiting_tokens + tokens > self.config.max_queued_tokens:
            raise self._overloaded(f"{self._waiting_tokens} prompt tokens wait already")
        if self._overcommit + share > self.config.max_overcommit:
            raise self._overloaded("the requests at hand may need all that the pool can promise")

    def _shed(self) -> None:
        load, start = max(self._estimates()), self.config.shed_above
        if load > start and self._chance() < (load - start) / (1 - start):
            raise self._overloaded(f"waiting work is {load:.0%} of what may wait")

    def _overloaded(self, message: str) -> Problem:
        wait_s = min(max(1, ceil(self.expected_wait_s)), _MAX_RETRY_S)
        words = f"the server is overloaded: {message}; try again later"
        return Overload(503, words, type="service_unavailable", code="unavailable", retry_after_s=wait_s)


def blocks_wanted(params: SamplingParams, num_tokens: int, info: Ready) -> list[int]:
    """Return, for each layer group, the maximum number of blocks for a prompt and its results.

    Raises:
        Problem: the prompt can never fit (400).
    """
    branches, shape, config = params.num_sequences, info.shape, info.scheduler
    try:
        most = resolve_max_tokens(
            num_tokens,
            params.max_tokens,
            shape,
            config,
            most_tokens=params.most_tokens,
            num_branches=branches,
        )
    except RequestError as error:
        is_long = num_tokens + (params.max_tokens or 1) > info.max_context
        raise Problem(400, str(error), code="context_length_exceeded" if is_long else None) from error
    size, chunk = shape.block_size, config.max_num_batched_tokens
    return most_blocks(num_tokens, most, shape.reaches, size, chunk, num_branches=branches)


class _FirstTokens:  # D300: waits follow from the rate of first tokens while a prompt waits
    """Tracker of prompts without a first token, and of the recent rate of first tokens.

    The rate counts only time during which some prompt was waiting, because an idle server produces few first
    tokens per second even if it is fast.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_awaited = 0
        self._clock = clock
        self._awaited_s = 0.0  # time during which some prompt was waiting, up to the last clock reading
        self._looked_s = clock()
        self._starts: deque[tuple[float, float]] = deque()  # (time, `_awaited_s` at that time)

    def await_one(self) -> None:
        """Add a prompt that waits for its first token."""
        self._look()
        self.num_awaited += 1

    def leave(self, *, started: bool) -> None:
        """Remove a waiting prompt; `started` is True if it got its first token, False if it never will."""
        now = self._look()
        self.num_awaited -= 1
        if started:
            self._starts.append((now, self._awaited_s))

    def per_s(self) -> float | None:
        """Return the rate of first tokens per second, or None if there are too few measurements."""
        self._look()
        if len(self._starts) < _MIN_STARTS:
            return None
        return len(self._starts) / max(self._awaited_s - self._starts[0][1], 1e-3)

    def _look(self) -> float:
        now = self._clock()
        if self.num_awaited:
            self._awaited_s += now - self._looked_s
        self._looked_s = now
        while self._starts and now - self._starts[0][0] > _WINDOW_S:
            self._starts.popleft()
        return now
