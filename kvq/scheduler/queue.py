"""The waiting requests: interactive before batch, tenants in turn, nobody for ever."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf

from kvq.scheduler.request import Priority, Request

_MOST_TENANTS = 10_000  # idle tenants whose service is remembered


class Tenants:
    """Tokens served per tenant. One that was idle starts level with the least served of those waiting.

    Source: Sheng et al., "Fairness in Serving Large Language Models" (virtual token counters), 2024.
    """

    def __init__(self) -> None:
        self._served: OrderedDict[str, float] = OrderedDict()
        self.last_to_leave = ""  # the tenant whose last waiting request was taken, most recently

    def served(self, tenant: str) -> float:
        """Tokens counted for a tenant."""
        return self._served.get(tenant, 0.0)

    def charge(self, tenant: str, tokens: float) -> None:
        """Count tokens that a tenant was served."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens
        self._served.move_to_end(tenant)
        if len(self._served) > _MOST_TENANTS:
            self._served.popitem(last=False)

    def lift(self, tenant: str, floor: float) -> None:
        """Let a tenant that comes back begin at `floor`, so that idle time earns no burst."""
        if self.served(tenant) < floor:
            self._served[tenant] = floor


class _Class:
    """The waiting requests of one priority: a line per tenant, the least served tenant first."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._lines: dict[str, deque[Request]] = {}
        self._order: list[tuple[float, int, str]] = []  # heap of (served when pushed, tie, tenant)
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
        """The request whose turn it is."""
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


class WaitingQueue:
    """Every request that holds no blocks yet. All operations but `remove` take O(log tenants)."""

    def __init__(self, *, aging_s: float) -> None:
        self.tenants = Tenants()
        self._aging_s = aging_s
        self._classes = {priority: _Class(self.tenants) for priority in Priority}
        self._where: dict[Request, _Class] = {}
        self._batch: deque[Request] = deque()  # batch requests by arrival; those gone are skipped

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._where))

    def __contains__(self, request: Request) -> bool:
        return request in self._where

    def append(self, request: Request) -> None:
        """Take a request in."""
        self._enter(request, self._classes[request.priority])
        if request.priority is Priority.BATCH:
            self._batch.append(request)

    def age(self, now: float) -> None:
        """Let batch requests that waited long enough stand in the interactive line."""
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
        """When the next batch request will have waited long enough; infinite if none waits."""
        waiting = self._classes[Priority.BATCH]
        since = (request.arrival_s for request in self._batch if self._where.get(request) is waiting)
        return next(since, inf) + self._aging_s

    def first(self) -> Request | None:
        """The request whose turn it is, or None."""
        return self._classes[Priority.INTERACTIVE].first() or self._classes[Priority.BATCH].first()

    def rank(self, request: Request) -> Priority:
        """The class in whose line a request stands."""
        aged = self._where[request] is self._classes[Priority.INTERACTIVE]
        return Priority.INTERACTIVE if aged else request.priority

    def remove(self, request: Request) -> None:
        """Let a request go: it was admitted, cancelled or parked."""
        self._where.pop(request).remove(request)

    def _enter(self, request: Request, place: _Class) -> None:
        place.append(request)
        self._where[request] = place
