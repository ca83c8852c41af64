"""Fair queue: always serves the tenant that has used the least time so far.

Source: start-time fair queueing (Goyal, Vin and Cheng, 1996), charged with the actual time of each item.
"""

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Queue of items grouped by tenant, first come, first served within each tenant.

        queue.put("a", item)
        tenant, item = queue.take()
        queue.charge(tenant, seconds)  # as soon as the time is known

    The queue has no clock and no threads. A returning tenant starts level with the others, so no tenant can
    save up time by staying away. Only tenants that wait, or have used more than waiting tenants, are
    remembered.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[T]] = {}  # waiting items, with tenants in order of arrival
        self._used: dict[str, float] = {}  # seconds since a common start
        self._now = 0.0  # lowest use of any waiting tenant, at the last `take`
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, tenant: str, item: T) -> None:
        """Append an item to the tenant's own queue."""
        if tenant not in self._items:
            self._items[tenant] = deque()
            self._used[tenant] = max(self._used.get(tenant, 0.0), self._now)
        self._items[tenant].append(item)
        self._length += 1

    def put_back(self, tenant: str, item: T) -> None:
        """Put an unfinished item back at the front of its tenant's queue."""
        self.put(tenant, item)
        self._items[tenant].rotate()

    def take(self, passed_over: Collection[str] = ()) -> tuple[str, T] | None:
        """Remove and return the first item of the tenant that has used the least time; ties go to the oldest.

        Returns None if no tenant outside `passed_over` is waiting.
        """
        there = [tenant for tenant in self._items if tenant not in passed_over]
        if not there:
            return None
        tenant = min(there, key=self._used.__getitem__)
        self._now = max(self._now, self._used[tenant])
        item = self._items[tenant].popleft()
        self._length -= 1
        waiting = self._items.pop(tenant)
        if waiting:
            self._items[tenant] = waiting  # after tenants with equal use
        self._forget()
        return tenant, item

    def charge(self, tenant: str, seconds: float) -> None:
        """Add the time that an item took to the tenant's use."""
        self._used[tenant] = max(self._used.get(tenant, 0.0), self._now) + seconds
        if not self._items:  # no other tenant had to wait for it
            self._now = max(self._used.values())
        self._forget()

    def remove(self, item: T) -> bool:
        """Remove an item. Return False if the queue does not contain it."""
        for tenant, waiting in self._items.items():
            for i, one in enumerate(waiting):
                if one is item:
                    del waiting[i]
                    self._length -= 1
                    if not waiting:
                        del self._items[tenant]
                    return True
        return False

    def _forget(self) -> None:
        """Forget tenants that have no items and have used no more time than the others."""
        if len(self._used) > 2 * len(self._items) + 16:
            self._used = {
                tenant: used
                for tenant, used in self._used.items()
                if tenant in self._items or used > self._now
            }
