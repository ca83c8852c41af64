"""Who holds no blocks: new requests, those that wait for somebody's prefix, and preempted ones."""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from kvq.blockmgr import Sequence
from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.queue import WaitingQueue
from kvq.scheduler.request import Priority, Request


@dataclass(slots=True, eq=False)
class _Parked:
    """Requests whose next prefix blocks a sequence is computing."""

    depth: int  # indexed blocks of the sequence when they were parked
    requests: list[Request] = field(default_factory=list)


class Lines:
    """The order in which requests get blocks, first or again."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.queue = WaitingQueue(aging_s=config.aging_s)
        self.preempted: list[Request] = []  # by place
        self._aging_s = config.aging_s
        # Were parked, and go before those of their class in the queue.
        self._ready: dict[Priority, deque[Request]] = {priority: deque() for priority in Priority}
        self._parked: dict[Sequence, _Parked] = {}
        self._num_parked = 0

    def __len__(self) -> int:
        ready = sum(map(len, self._ready.values()))
        return len(self.queue) + ready + self._num_parked + len(self.preempted)

    @property
    def num_waiting(self) -> int:
        """Requests that were never admitted."""
        return len(self) - len(self.preempted)

    @property
    def num_parked(self) -> int:
        """Requests that wait for a prefix that is being computed."""
        return self._num_parked

    def requests(self) -> list[Request]:
        """All of them."""
        parked = [request for group in self._parked.values() for request in group.requests]
        ready = [request for line in self._ready.values() for request in line]
        return [*self.preempted, *ready, *parked, *self.queue]

    def put_back(self, request: Request) -> None:
        """Take a preempted request in, at its old place."""
        insort(self.preempted, request, key=lambda other: other.place)

    def park(self, request: Request, owner: Sequence) -> None:
        """Let a request wait until a sequence has indexed more, or ended."""
        self.remove(request)
        self._parked.setdefault(owner, _Parked(owner.depth)).requests.append(request)
        self._num_parked += 1

    def wake(self) -> None:
        """Make those ready whose prefix came nearer, or will not come. O(sequences waited for)."""
        for owner, group in list(self._parked.items()):
            if owner.depth != group.depth or not owner.announced:
                del self._parked[owner]
                self._num_parked -= len(group.requests)
                for request in group.requests:
                    self._ready[request.priority].append(request)

    def first(self, now: float, below: Priority | None) -> Request | None:
        """Whose turn it is; `below`: only among classes that go before that one.

        A preempted request goes before waiting ones of its class, so that nobody overtakes it.
        """
        outside = [*self.preempted, *(line[0] for line in self._ready.values() if line)]
        ranked = [(self.rank(request, now), request) for request in outside]
        if (queued := self.queue.first()) is not None:
            ranked.append((self.queue.rank(queued), queued))
        ranked = [entry for entry in ranked if below is None or entry[0] < below]
        return min(ranked, key=lambda entry: entry[0], default=(None, None))[1]

    def rank(self, request: Request, now: float) -> Priority:
        """The class a request counts in that waits outside the queue: it ages as those inside do."""
        since = request.preempted_s if request.is_preempted else request.arrival_s
        return Priority.INTERACTIVE if now - since >= self._aging_s else request.priority

    def next_aging_s(self) -> float:
        """When somebody who waits will count as more urgent than now; infinite if nobody will."""
        since = [request.preempted_s for request in self.preempted if request.priority is Priority.BATCH]
        since += [request.arrival_s for request in self._ready[Priority.BATCH]]
        times = [begin + self._aging_s for begin in since]
        return min([*times, self.queue.next_aging_s()])

    def remove(self, request: Request) -> None:
        """Let a request go, wherever it stands."""
        if request.is_preempted:
            self.preempted.remove(request)
        elif request in self.queue:
            self.queue.remove(request)
        elif request in self._ready[request.priority]:
            self._ready[request.priority].remove(request)
        else:
            owner = next(owner for owner, group in self._parked.items() if request in group.requests)
            self._parked[owner].requests.remove(request)
            self._num_parked -= 1
            if not self._parked[owner].requests:
                del self._parked[owner]
