"""Orders that `kvq.cache` carries out on block bytes, and events for metrics, routers and tests.

Orders are carried out one after another, in the sequence in which they were queued, before the next step's
writes. A block may be freed and allocated again between two orders, which is safe only because the sequence
is kept. A copy is also an event. Events never carry token ids.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvq.blockmgr.packed.ladder import Pack, Packed
from kvq.blockmgr.pool import BlockId
from kvq.tiers.tiers import BlockKey, Form


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Order: copy all bytes of a block, before a write to a shared block or to reuse its first tokens."""

    group: int
    source: BlockId
    target: BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class Scrub:
    """Order: zero a failed request's block before another sequence gets it."""

    group: int
    block: BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class Demote:
    """Order: copy the bytes of a block that was evicted to the tiers below the pools."""

    group: int
    source: BlockId | Packed
    key: BlockKey
    form: Form


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """Order: overwrite a block with bytes from the tiers, or with a packed block."""

    group: int
    block: BlockId
    content: Any  # a buffer, or a Packed
    rung: int  # the format of the bytes


Order = Copy | Scrub | Demote | Fill | Pack

_log = logging.getLogger("kvq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Event: a block entered the prefix index. `parent`: digest of the preceding block, or of the root."""

    group: int
    block: BlockId
    digest: bytes
    parent: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted:
    """Event: a cached block left the prefix index; its bytes may be overwritten."""

    group: int
    block: BlockId
    digest: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Event: a new sequence found an indexed block and will use it."""

    group: int
    block: BlockId


Event = Stored | Evicted | Found | Copy
Subscriber = Callable[[Event], object]


class Events:
    """Queue of events. They are delivered, in order, once the operation that caused them is complete."""

    def __init__(self) -> None:
        self.active = False  # True while there are subscribers; otherwise no events are created
        self._subscribers: list[Subscriber] = []
        self._queue: list[Event] = []

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on. Returns a function that unsubscribes."""
        self._subscribers.append(subscriber)
        self.active = True

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)
            self.active = bool(self._subscribers)

        return unsubscribe

    def add(self, event: Event) -> None:
        """Queue an event for the next `deliver`."""
        self._queue.append(event)

    def deliver(self) -> None:
        """Deliver the queued events. A subscriber that raises an error is logged and removed."""
        queue, self._queue = self._queue, []
        for event in queue:
            for subscriber in tuple(self._subscribers):
                try:
                    subscriber(event)
                except Exception:  # noqa: BLE001 - a subscriber's error must not undo an allocation
                    _log.exception("a subscriber to block events failed and is dropped")
                    if subscriber in self._subscribers:  # it may have unsubscribed itself
                        self._subscribers.remove(subscriber)
        self.active = bool(self._subscribers)
