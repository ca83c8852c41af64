"""Which replica a request goes to."""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import count
from zlib import crc32

from kvq.capacity.fleet.call import Call
from kvq.capacity.fleet.replica import Replica

_MOST_AHEAD = 8  # requests that a replica with a prefix may have more than the least loaded one
_LONG_PREFIX = 0.25  # of a prompt, from which on a replica that holds it is worth going to

Router = Callable[[Call, Sequence[Replica]], Replica]


class Routing(Enum):
    """Policies."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"  # fewest requests that have not ended
    SESSION = "session"  # always the same replica for the turns of a conversation
    PREFIX = "prefix"  # the replica that has most of the prompt cached, unless it is much busier


def make_router(routing: Routing) -> Router:
    """A function that chooses among replicas that are ready, and have come as far as the arrival."""
    turn = count()

    def least_loaded(call: Call, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: (len(replica.live), replica.index))

    def in_turn(call: Call, replicas: Sequence[Replica]) -> Replica:
        return replicas[next(turn) % len(replicas)]

    def by_session(call: Call, replicas: Sequence[Replica]) -> Replica:
        return replicas[crc32(call.session.encode()) % len(replicas)]

    def by_prefix(call: Call, replicas: Sequence[Replica]) -> Replica:
        fallback = least_loaded(call, replicas)
        cached = {replica: replica.cached(call) for replica in replicas}
        best = max(replicas, key=lambda replica: (cached[replica], -len(replica.live), -replica.index))
        is_worth_it = cached[best] >= _LONG_PREFIX * len(call.prompt)
        return best if is_worth_it and len(best.live) <= len(fallback.live) + _MOST_AHEAD else fallback

    routers: dict[Routing, Router] = {
        Routing.ROUND_ROBIN: in_turn,
        Routing.LEAST_LOADED: least_loaded,
        Routing.SESSION: by_session,
        Routing.PREFIX: by_prefix,
    }
    return routers[routing]
