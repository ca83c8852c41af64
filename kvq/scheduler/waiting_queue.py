"""Waiting queues: requests without blocks, whether new, waiting for a shared prefix, or preempted.

Interactive requests precede batch requests, tenants are served fairly, and no request waits forever.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from kvq.blockmgr import Sequence
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.request import Priority, Request

_MOST_TENANTS = 10_000  # maximum number of tenants whose served tokens are remembered


class _Tenants:
    """Tokens served per tenant. A returning tenant starts level with the least-served waiting tenant.

    Source: Sheng et al., "Fairness in Serving Large Language Models" (virtual token counters), 2024.
    """

    def __init__(self) -> None:
        self._served: OrderedDict[str, float] = OrderedDict()
        self.last_to_leave = ""  # the tenant whose last waiting request was removed most recently

    def served(self, tenant: str) -> float:
        """Return the number of tokens counted for a tenant."""
        return self._served.get(tenant, 0.0)

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens to a tenant's count."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens
        self._served.move_to_end(tenant)
        if len(self._served) > _MOST_TENANTS:
            self._served.popitem(last=False)

    def lift(self, tenant: str, floor: float) -> None:
        """Raise a returning tenant's count to `floor`, so that idle time doesn't earn a burst."""
        if self.served(tenant) < floor:
            self._served[tenant] = floor


class _Class:
    """Waiting requests of one priority: one queue per tenant, the least-served tenant first."""

    def __init__(self, tenants: _Tenants) -> None:
        self._tenants = tenants
        self._lines: dict[str, deque[Request]] = {}
        self._order: list[tuple[float, int, str]] = []  # heap of (served when pushed, tie-breaker, tenant)
        self._pushed = 0
        self._in_order: set[str] = set()  # tenants in the heap, each once

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line

    def append(self, request: Request) -> None:
        line = self._lines.get(request.tenant)
        if line is None:
            least = self.first()
            level = self._tenants.last_to_leave if least is None else least.tenant
            self._tenants.lift(request.tenant, self._tenants.served(level))
            line = self._lines[request.tenant] = deque()
            self._push(request.tenant)
        line.append(request)

    def first(self) -> Request | None:
        """Return the next request to serve, or None if there is none."""
        while self._order:
            served, _, tenant = self._order[0]
            if tenant in self._lines and self._tenants.served(tenant) <= served:
                return self._lines[tenant][0]
            heappop(self._order)
            self._in_order.discard(tenant)
            if tenant in self._lines:
                self._push(tenant)
        return None

    def remove(self, request: Request) -> None:
        line = self._lines[request.tenant]
        if line[0] is request:
            line.popleft()
        else:
            line.remove(request)
        if not line:
            del self._lines[request.tenant]
            self._tenants.last_to_leave = request.tenant

    def _push(self, tenant: str) -> None:
        if tenant in self._in_order:
            return
        self._in_order.add(tenant)
        self._pushed += 1
        heappush(self._order, (self._tenants.served(tenant), self._pushed, tenant))


class _FairQueue:
    """Fair queue of requests that never had blocks. All operations except `remove` take O(log tenants)."""

    def __init__(self, *, aging_s: float) -> None:
        self.tenants = _Tenants()
        self._aging_s = aging_s
        self._classes = {priority: _Class(self.tenants) for priority in Priority}
        self._where: dict[Request, _Class] = {}
        self._batch: deque[Request] = deque()  # batch requests by arrival; removed ones are skipped

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._where))

    def __contains__(self, request: Request) -> bool:
        return request in self._where

    def append(self, request: Request) -> None:
        """Add a request."""
        self._enter(request, self._classes[request.priority])
        if request.priority is Priority.BATCH:
            self._batch.append(request)

    def age(self, now: float) -> None:
        """Move batch requests that have waited long enough to the interactive queue."""
        batch, waiting = self._batch, self._classes[Priority.BATCH]
        while batch:
            request = batch[0]
            if self._where.get(request) is waiting:
                if now - request.arrival_s < self._aging_s:
                    return
                waiting.remove(request)
                self._enter(request, self._classes[Priority.INTERACTIVE])
            batch.popleft()

    def next_aging_s(self) -> float:
        """Return the time at which the next batch request will have waited long enough; infinity if none."""
        waiting = self._classes[Priority.BATCH]
        since = (request.arrival_s for request in self._batch if self._where.get(request) is waiting)
        return next(since, inf) + self._aging_s

    def first(self) -> Request | None:
        """Return the next request to serve, or None if there is none."""
        return self._classes[Priority.INTERACTIVE].first() or self._classes[Priority.BATCH].first()

    def rank(self, request: Request) -> Priority:
        """Return the priority of the queue that contains the request."""
        aged = self._where[request] is self._classes[Priority.INTERACTIVE]
        return Priority.INTERACTIVE if aged else request.priority

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted, cancelled or parked."""
        self._where.pop(request).remove(request)

    def _enter(self, request: Request, place: _Class) -> None:
        place.append(request)
        self._where[request] = place


@dataclass(slots=True, eq=False)
class _Parked:
    """Requests whose next prefix blocks a running sequence is computing."""

    depth: int  # indexed blocks of the sequence when they were parked
    requests: list[Request] = field(default_factory=list)


class WaitingQueue:
    """All requests without blocks, in the order in which they will get blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.queue = _FairQueue(aging_s=config.aging_s)
        self.preempted: list[Request] = []  # in the order of `place`
        self._aging_s = config.aging_s
        # No longer parked; they precede the queued requests of their priority.
        self._ready: dict[Priority, deque[Request]] = {priority: deque() for priority in Priority}
        self._parked: dict[Sequence, _Parked] = {}
        self.num_parked = 0  # requests that wait for a prefix that another request computes

    def __len__(self) -> int:
        ready = sum(map(len, self._ready.values()))
        return len(self.queue) + ready + self.num_parked + len(self.preempted)

    @property
    def num_waiting(self) -> int:
        """Number of requests that were never admitted."""
        return len(self) - len(self.preempted)

    def requests(self) -> list[Request]:
        """Return all requests without blocks."""
        parked = [request for group in self._parked.values() for request in group.requests]
        ready = [request for line in self._ready.values() for request in line]
        return [*self.preempted, *ready, *parked, *self.queue]

    def put_back(self, request: Request) -> None:
        """Insert a preempted request at its former place."""
        insort(self.preempted, request, key=lambda other: other.place)

    def park(self, request: Request, owner: Sequence) -> None:
        """Make a request wait until `owner` has indexed more blocks or has ended."""
        self.remove(request)
        self._parked.setdefault(owner, _Parked(owner.depth)).requests.append(request)
        self.num_parked += 1

    def wake(self) -> None:
        """Unpark requests whose prefix has grown or won't be computed. O(number of sequences waited for)."""
        for owner, group in list(self._parked.items()):
            if owner.depth != group.depth or not owner.announced:
                del self._parked[owner]
                self.num_parked -= len(group.requests)
                for request in group.requests:
                    self._ready[request.priority].append(request)

    def first(self, now: float, below: Priority | None) -> Request | None:
        """Return the next request to serve. `below`: consider only priorities more urgent than this one.

        A preempted request precedes waiting requests of the same priority, so that none overtakes it.
        """
        outside = [*self.preempted, *(line[0] for line in self._ready.values() if line)]
        ranked = [(self.rank(request, now), request) for request in outside]
        if (queued := self.queue.first()) is not None:
            ranked.append((self.queue.rank(queued), queued))
        ranked = [entry for entry in ranked if below is None or entry[0] < below]
        return min(ranked, key=lambda entry: entry[0], default=(None, None))[1]

    def rank(self, request: Request, now: float) -> Priority:
        """Return the priority of a request outside the fair queue, with the same aging as inside it."""
        since = request.preempted_s if request.is_preempted else request.arrival_s
        return Priority.INTERACTIVE if now - since >= self._aging_s else request.priority

    def next_aging_s(self) -> float:
        """Return the time at which the next waiting request becomes more urgent, or infinity if none will."""
        since = [request.preempted_s for request in self.preempted if request.priority is Priority.BATCH]
        since += [request.arrival_s for request in self._ready[Priority.BATCH]]
        times = [begin + self._aging_s for begin in since]
        return min([*times, self.queue.next_aging_s()])

    def remove(self, request: Request) -> None:
        """Remove a request from the queue that contains it."""
        if request.is_preempted:
            self.preempted.remove(request)
        elif request in self.queue:
            self.queue.remove(request)
        elif request in self._ready[request.priority]:
            self._ready[request.priority].remove(request)
        else:
            owner = next(owner for owner, group in self._parked.items() if request in group.requests)
            self._parked[owner].requests.remove(request)
            self.num_parked -= 1
            if not self._parked[owner].requests:
                del self._parked[owner]
