"""Routing policies of a fleet: kvq's own policies and Ray Serve's."""

import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from zlib import crc32

from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.fleet.replica import Replica

MOST_AHEAD = 8  # excess of requests over the least loaded replica that a prefix hit justifies
_LONG_PREFIX = 0.25  # smallest cached share of a prompt at which the prefix determines the replica
LONG_MATCH = 0.1  # smallest matching share of a prompt at which Ray routes by prefix
# D285: the same decisions as Ray's, but with pieces of 16 tokens
REMEMBERED_TOKENS = 1 << 20  # per replica, in Ray's tree

Router = Callable[[Call, Sequence[Replica]], Replica]


class Routing(Enum):
    """Routing policy; the values are the names on the command line."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"  # the replica with the fewest unfinished requests
    SESSION = "session"  # always the same replica for the turns of a conversation
    PREFIX = "prefix"  # the replica with the longest cached prefix, unless it is much busier
    TWO_CHOICES = "two-choices"  # the less loaded of two random replicas, Ray's default
    AFFINITY = "affinity"  # the replica that already received the longest prefix, as in Ray's prefix router

    @property
    def goes_by_load(self) -> bool:
        """True if the policy needs the replicas' state at the time of arrival."""
        return self not in (Routing.ROUND_ROBIN, Routing.SESSION)


def make_router(routing: Routing, seed: int = 0) -> Router:
    """Return a function that chooses among ready replicas, all simulated up to the request's arrival."""
    turn = count()

    def in_turn(call: Call, replicas: Sequence[Replica]) -> Replica:
        return replicas[next(turn) % len(replicas)]

    def by_session(call: Call, replicas: Sequence[Replica]) -> Replica:
        return replicas[crc32(call.session.encode()) % len(replicas)]

    def by_prefix(call: Call, replicas: Sequence[Replica]) -> Replica:
        fallback = _least_loaded(call, replicas)
        cached = {replica: replica.cached(call) for replica in replicas}
        best = max(replicas, key=lambda replica: (cached[replica], -len(replica.live), -replica.index))
        is_worth_it = cached[best] >= _LONG_PREFIX * len(call.prompt)
        return best if is_worth_it and len(best.live) <= len(fallback.live) + MOST_AHEAD else fallback

    routers: dict[Routing, Router] = {
        Routing.ROUND_ROBIN: in_turn,
        Routing.LEAST_LOADED: _least_loaded,
        Routing.SESSION: by_session,
        Routing.PREFIX: by_prefix,
        Routing.TWO_CHOICES: _two_choices(seed),
        Routing.AFFINITY: _affinity(seed),
    }
    return routers[routing]


def _least_loaded(call: Call, replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (len(replica.live), replica.index))


def _two_choices(seed: int) -> Router:
    """Return a router that picks two random replicas and chooses the less loaded of the two.

    Source: Mitzenmacher 2001, The Power of Two Choices; `PowerOfTwoChoicesRequestRouter` of Ray 2.60.
    """
    rng = random.Random(seed)

    def choose(_: Call, replicas: Sequence[Replica]) -> Replica:
        return min(rng.sample(replicas, min(2, len(replicas))), key=lambda replica: len(replica.live))

    return choose


def _affinity(seed: int) -> Router:
    """Return a router that prefers the replicas that already received the longest prefix of a prompt.

    If this prefix is too short, it prefers the replicas with the least text. Ties go to the replica with the
    fewest requests. If the loads differ by more than `MOST_AHEAD` requests, it chooses the less loaded of two
    random replicas.

    Source: `PrefixCacheAffinityRouter` of Ray 2.60.
    """
    elsewhere, tree = _two_choices(seed), _PrefixTree()
    restarts: dict[int, int] = {}

    def choose(call: Call, replicas: Sequence[Replica]) -> Replica:
        for replica in replicas:
            if restarts.setdefault(replica.index, 0) < replica.gauges.restarts:  # its cache is empty now
                restarts[replica.index] = replica.gauges.restarts
                tree.remove(replica.index)
        loads = [len(replica.live) for replica in replicas]
        chosen = elsewhere(call, replicas)
        if max(loads) - min(loads) <= MOST_AHEAD:
            among = {replica.index for replica in replicas}
            length, holders = tree.match(call.prompt, among)
            if length < LONG_MATCH * len(call.prompt):
                holders = tree.smallest(among)
            fitting = [replica for replica in replicas if replica.index in holders]
            chosen = min(fitting, key=lambda replica: len(replica.live), default=chosen)
        tree.insert(call.prompt, chosen.index)
        return chosen

    return choose


@dataclass(slots=True, eq=False)
class _Node:
    parent: "_Node | None" = None
    piece: bytes = b""
    children: "dict[bytes, _Node]" = field(default_factory=dict)
    holders: set[int] = field(default_factory=set)


class _PrefixTree:
    """Prefix tree of the prompts that each replica received.

    Prompts are split every `PIECE` tokens, while Ray's tree splits wherever two texts diverge. Beyond
    `most_tokens` per replica, the least recently used pieces are evicted, but never before their successors.
    """

    PIECE = 16  # tokens

    def __init__(self, most_tokens: int = REMEMBERED_TOKENS) -> None:
        self._root = _Node()
        self._most = most_tokens // self.PIECE
        self._of: dict[int, OrderedDict[_Node, None]] = {}  # each replica's pieces, least recently used first

    def match(self, prompt: "array[int]", among: Collection[int]) -> tuple[int, set[int]]:
        """Return the length of the longest prefix seen by any replica, and all replicas that have seen it."""
        node, length = self._root, 0
        for piece in self._pieces(prompt):
            after = node.children.get(piece)
            if after is None or after.holders.isdisjoint(among):
                break
            node, length = after, length + self.PIECE
        return length, node.holders.intersection(among)

    def smallest(self, among: Collection[int]) -> set[int]:
        """Return the replicas with the fewest remembered pieces."""
        least = min(self._size(index) for index in among)
        return {index for index in among if self._size(index) == least}

    def insert(self, prompt: "array[int]", replica: int) -> None:
        """Record that a prompt is sent to a replica."""
        held, path = self._of.setdefault(replica, OrderedDict()), []
        node = self._root
        for piece in self._pieces(prompt):
            node = node.children.setdefault(piece, _Node(parent=node, piece=piece))
            path.append(node)
        for node in reversed(path):  # so that successors are older
            node.holders.add(replica)
            held[node] = None
            held.move_to_end(node)
        while len(held) > self._most:
            self._drop(held.popitem(last=False)[0], replica)

    def remove(self, replica: int) -> None:
        """Remove all prompts of a replica."""
        for node in self._of.pop(replica, ()):
            self._drop(node, replica)

    def _size(self, replica: int) -> int:
        return len(self._of.get(replica, ()))

    def _pieces(self, prompt: "array[int]") -> list[bytes]:
        size = self.PIECE
        return [prompt[i : i + size].tobytes() for i in range(0, len(prompt) - size + 1, size)]

    def _drop(self, node: _Node, replica: int) -> None:
        node.holders.discard(replica)
        if not node.holders and node.parent is not None:
            node.parent.children.pop(node.piece, None)
