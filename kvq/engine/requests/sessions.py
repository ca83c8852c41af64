"""Sessions: conversations that pause and return, whose KV is kept, moved down and brought back in time.

A request names its session. When it ends, its prefix stays pinned for as long as the request asks, or as long
as the session's pauses usually last, within the limit of all pins. Before the session usually returns, what
has left the pools is brought back, unless requests wait.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp, log
from typing import get_args

from kvq.blockmgr import PrefixQuery
from kvq.blockmgr.prefix import Node
from kvq.engine.params import HintAction
from kvq.engine.requests.request_state import Job
from kvq.errors import KVQError, OutOfBlocks, RequestError, not_one_of
from kvq.scheduler import Request, Scheduler

_MOST_TOKENS = 1 << 24  # of all sessions
_LEAST_TOKENS = 1 << 12  # that a session counts as, so there are at most 4,096 of them
_USUAL_PAUSE_S = 10.0  # while a session has not returned yet
_MOST_RETAINED_S = 300.0  # unless a request asks for more
_RATE = 0.3  # weight of the last pause in the averages
_LEAST_PAUSES = 2  # until a session's return is foreseen


@dataclass(slots=True, eq=False)
class _Session:
    """Session: what it sent last, and how long it usually pauses."""

    tokens: "array[int]"  # of its last request, with its answer
    salts: tuple[str | None, str | None]  # shared, cache
    ended_s: float
    pause: float = log(_USUAL_PAUSE_S)  # moving average of the logarithm of its pauses
    spread: float = 0.5  # of the logarithms' distance from it
    num_pauses: int = 0
    pinned: Node | None = None  # the last block of its pin, which may be over
    requests: set[Job] = field(default_factory=set)  # that run or wait

    @property
    def size(self) -> int:
        return max(len(self.tokens), _LEAST_TOKENS)


def check_action(action: str) -> None:
    """Raise RequestError if a hint's action is unknown."""
    if action not in get_args(HintAction):
        raise RequestError(not_one_of("action", action, get_args(HintAction)))


class Sessions:
    """Sessions of all tenants, the least recently used ones first. All calls must come from one thread."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()  # by tenant and name
        self._due: list[tuple[float, int, tuple[str, str], float]] = []  # heap: when, number, who, `ended_s`
        self._num_tokens: Counter[str] = Counter()  # by tenant
        self.num_prefetched = 0  # since the start

    def begin(self, job: Job) -> None:
        """Note that a session has returned."""
        session = self._sessions.get((job.tenant, job.session or ""))
        if job.session is None or session is None:
            return
        session.requests.add(job)
        pause = job.timing.arrival_s - session.ended_s
        if len(session.requests) == 1 and pause > 0:
            away = log(max(pause, 1e-3)) - session.pause
            rate = _RATE if session.num_pauses else 1.0
            session.pause += rate * away
            session.spread += rate * (abs(away) - session.spread) if session.num_pauses else 0.0
            session.num_pauses += 1

    def end(self, job: Job, now: float, error: KVQError | None = None) -> None:
        """Keep the prefix of a request that has ended, unless it failed; foresee when its session returns."""
        key = job.tenant, job.session or ""
        if (known := self._sessions.get(key)) is not None:
            known.requests.discard(job)
        if job.session is None or not job.branches or error is not None:
            return
        session = self._forget(key) or _Session(array("I"), (None, None), now)
        session.tokens = job.keyed(job.branches[0].tokens)
        session.salts = job.shared_salt, job.cache_salt
        session.ended_s = now
        self._sessions[key] = session
        self._num_tokens[job.tenant] += session.size
        while self._num_tokens.total() > _MOST_TOKENS:  # the tenant that has most forgets its oldest
            most = max(self._num_tokens, key=self._num_tokens.__getitem__)
            self._forget(next(at for at in self._sessions if at[0] == most))
        if key not in self._sessions:
            return
        longest = exp(session.pause + 2 * session.spread)
        seconds = min(longest, _MOST_RETAINED_S) if job.retain_s is None else job.retain_s
        self._retain(key, session, seconds)
        if session.num_pauses >= _LEAST_PAUSES:
            when = now + exp(session.pause - session.spread)
            heappush(self._due, (when, len(self._due), key, now))

    def hint(self, tenant: str, name: str, action: HintAction, seconds: float | None = None) -> None:
        """Do what a client asks for a session. Does nothing if the session is not known.

        Raises:
            RequestError: the action is unknown.
        """
        check_action(action)
        session = self._sessions.get((tenant, name))
        if session is None:
            return
        manager = self._scheduler.manager
        if action == "retain":
            self._retain((tenant, name), session, _MOST_RETAINED_S if seconds is None else seconds)
        elif action == "prefetch":
            self._prefetch((tenant, name), session)
        else:
            self._unpin((tenant, name), session)
            manager.below.give_up(self._prompt(tenant, session), to_tiers=action == "demote")
            if action == "release":
                self._forget((tenant, name))

    def prefetch_due(self) -> bool:
        """Bring back sessions that are about to return, unless requests wait. Return True if any is."""
        now, found = self._clock(), False
        while self._due and self._due[0][0] <= now:
            _, _, key, ended_s = heappop(self._due)
            session = self._sessions.get(key)
            is_away = session is not None and session.ended_s == ended_s and not session.requests
            if session is not None and is_away and not len(self._scheduler.waiting):
                found = self._prefetch(key, session) or found
        return found

    def wait_s(self) -> float | None:
        """Return the seconds until `prefetch_due` has something to do, or None."""
        return max(0.0, self._due[0][0] - self._clock()) if self._due else None

    def _retain(self, key: tuple[str, str], session: _Session, seconds: float) -> None:
        """Pin a session's prefix, as far as the limit of pins allows."""
        self._unpin(key, session)
        manager = self._scheduler.manager
        nodes = manager.prefixes.whole(self._prompt(key[0], session)) if seconds else []
        try:
            if manager.pins.add(nodes, self._clock() + seconds, key):
                session.pinned = nodes[-1]
        except OutOfBlocks:  # the usual order of eviction decides
            return

    def _prefetch(self, key: tuple[str, str], session: _Session) -> bool:
        prompt = self._prompt(key[0], session)
        stand_in = Request(id="prefetch", tokens=session.tokens, max_tokens=1, tenant=key[0])
        found = self._scheduler.manager.lookup(prompt)
        if found.waits_for is not None:
            return False
        begun = self._scheduler.loading.begin(stand_in, prompt, found.length, self._clock())
        self.num_prefetched += begun is not None
        return begun is not None

    def _prompt(self, tenant: str, session: _Session) -> PrefixQuery:
        shared, salt = session.salts
        return self._scheduler.manager.prompt(
            session.tokens, tenant=tenant, shared_salt=shared, cache_salt=salt
        )

    def _unpin(self, key: tuple[str, str], session: _Session) -> None:
        if session.pinned is not None:
            self._scheduler.manager.pins.release(session.pinned, key)
            session.pinned = None

    def _forget(self, key: tuple[str, str]) -> _Session | None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._unpin(key, session)
            self._num_tokens -= Counter({key[0]: session.size})
        return session
