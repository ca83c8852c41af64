"""A line that is fair by tenant: who has used least of what is scarce is next, whoever came first.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), charged with what each item took in the end.
"""

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLine(Generic[T]):
    """Items of tenants, first come first served within one.

        line.put("a", item)
        tenant, item = line.take()
        line.charge(tenant, seconds)  # as soon as that is known

    Without clocks or threads. Who comes back begins where those who are present stand: nobody saves up turns
    by staying away. Only those who wait, or are ahead of those who do, are remembered.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[T]] = {}  # of those who wait, in the order of their coming
        self._used: dict[str, float] = {}  # seconds, from a start that all share
        self._now = 0.0  # the least used of those present, as it was at the last turn
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, tenant: str, item: T) -> None:
        """Take a place at the end of the tenant's own line."""
        if tenant not in self._items:
            self._items[tenant] = deque()
            self._used[tenant] = max(self._used.get(tenant, 0.0), self._now)
        self._items[tenant].append(item)
        self._length += 1

    def put_back(self, tenant: str, item: T) -> None:
        """Take the first place in the tenant's own line, as an item that was taken and is not done."""
        self.put(tenant, item)
        self._items[tenant].rotate()

    def take(self, passed_over: Collection[str] = ()) -> tuple[str, T] | None:
        """The first item of the tenant that has used least; of equals, of whoever came first.

        None: nobody waits but, maybe, tenants that are `passed_over`.
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
            self._items[tenant] = waiting  # behind its equals
        self._forget()
        return tenant, item

    def charge(self, tenant: str, seconds: float) -> None:
        """Count what an item of a tenant took."""
        self._used[tenant] = max(self._used.get(tenant, 0.0), self._now) + seconds
        if not self._items:  # nobody was kept waiting by it
            self._now = max(self._used.values())
        self._forget()

    def remove(self, item: T) -> bool:
        """Leave the line; False if the item is not in it."""
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
        """Those who are away and would come back to where the others stand."""
        if len(self._used) > 2 * len(self._items) + 16:
            self._used = {
                tenant: used
                for tenant, used in self._used.items()
                if tenant in self._items or used > self._now
            }
