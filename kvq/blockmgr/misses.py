"""Causes of prefix misses: where a prompt left what is cached, and why, as told by a memory of what left.

No torch, no clock.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from operator import itemgetter
from typing import Any, Generic, Literal, TypeVar, get_args

from kvq.blockmgr.pool import BlockPool
from kvq.blockmgr.prefix import TOKEN_BYTES, Node, PrefixIndex, PrefixQuery, common_tokens
from kvq.blockmgr.sequence import Sequence as Holder

Cause = Literal[
    "new_text",  # longer than anything cached, such as a turn that was added: no fault
    "changed_text",  # other tokens follow the same ones in the cache
    "template",  # the same, within text that the chat template writes: a date, a list of tools, a role
    "salt",  # the tenant sent the same first block under another salt
    "evicted",  # it was cached and had to make room
    "too_old",  # it was cached and reached its maximum age
    "no_snapshot",  # tokens are cached, but not the recurrent state or the window that must be there, too
    "format",  # it is kept, but more of it in fewer bits than `kv_cold_share` allows
    "limit",  # the request forbids reuse there, since it needs log-probabilities of the prompt
    "off",  # prefix caching is off
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
Range = tuple[int, int]  # first and last token that differ if a message's text does


@dataclass(kw_only=True, slots=True)  # one per request: a frozen one would take 1 us more to create
class PrefixMiss:
    """Place and cause of a prefix miss. It never depends on prompts of other tenants."""

    cause: Cause
    token: int  # index of the first prompt token that left what is cached: so many are common
    lost_tokens: int = 0  # that were cached after it and are gone, or can't be used without a snapshot
    seconds_ago: float | None = None  # since they were evicted or became too old
    evicted_for: str = ""  # id of the tenant's own request that took the room, or in words who did
    message: int | None = None  # number of the chat message that has the token, or follows it; from 1
    part: Literal["", "text", "template"] = ""  # of a chat: the message's text, or what the template writes

    def placed(self, texts: Sequence[Range]) -> "PrefixMiss":
        """Return the miss with its place in a chat, given the first and last token of each text."""
        if not texts:
            return self
        number = bisect_right(texts, self.token, key=itemgetter(0))
        if number and self.token <= texts[number - 1][1]:
            return replace(self, message=number, part="text")
        following = number + 1 if number < len(texts) else None
        cause: Cause = "template" if self.cause == "changed_text" else self.cause
        return replace(self, cause=cause, message=following, part="template")

    def facts(self) -> dict[str, Any]:
        """Return the cause, the token, and the other fields that say something."""
        return {name: value for name, value in asdict(self).items() if value or name == "token"}


OFF = PrefixMiss(cause="off", token=0)
Takers = Iterable[Iterable[tuple[Holder, int, bool]]]  # by layer group: sequences that need blocks
_Loss = tuple[Cause, float, list[tuple[str, str]]]  # when, and for which (tenant, request)
_K = TypeVar("_K")
_V = TypeVar("_V")


class _Recent(Generic[_K, _V]):
    """The latest entries of a mapping, at least `most` of them and at most twice as many."""

    def __init__(self) -> None:
        self._new: dict[_K, _V] = {}
        self._old: dict[_K, _V] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def room(self, count: int, most: int) -> dict[_K, _V]:
        """Return the mapping that `count` new entries go to."""
        if len(self._new) + count > most:
            self._old, self._new = self._new, {}
        return self._new

    def get(self, key: _K) -> _V | None:
        found = self._new.get(key)
        return self._old.get(key) if found is None else found


class Misses:  # D397: keys hold the tenant's salt; two generations instead of an order
    """Memory of evicted blocks and of the salts that tenants used, bounded by the sizes of the pools.

    Everything is found by digests that begin with the prompt's own salt, or by its tenant, so no prompt of
    another tenant changes an explanation. `refuses` may be set to a function that returns True if a
    prompt's block with an index is kept only in a format that must not be read.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None],
        ends: Sequence[int | None],
    ) -> None:
        """`windows`, `ends`: by layer group, as in `Blocks`."""
        self.now = 0.0  # seconds on the callers' clock
        self.takers: Takers = ()  # those for whom blocks are evicted now
        self.refuses: Callable[[PrefixQuery, int], bool] | None = None
        self._index = index
        self._pools = pools
        self._windows = windows
        self._ends = ends
        self._lost: list[_Recent[bytes, _Loss]] = [_Recent() for _ in pools]  # by digest
        self._children: _Recent[bytes, tuple[bytes, bytes]] = _Recent()  # a node's last one: digest, tokens
        self._salts: _Recent[tuple[str, bytes], bytes] = _Recent()  # last root of a tenant's first block

    def __len__(self) -> int:
        return sum(len(lost) for lost in self._lost) + len(self._children) + len(self._salts)

    def evicted(self, group: int, nodes: list[Node]) -> None:
        """Note that these nodes' blocks in a layer group were evicted to make room for `takers`."""
        most = self._pools[group].num_blocks
        whom = [(one.tenant, one.request) for taking in self.takers for one, _, _ in taking]
        loss: _Loss = ("evicted", self.now, whom)
        lost = self._lost[group].room(len(nodes), most)
        for node in nodes:
            lost[node.digest] = loss
            if not node.alive and (parent := node.parent) is not None and parent.alive:
                self._children.room(1, most)[parent.digest] = (node.digest, node.tokens)

    def lose(self, digests: Iterable[bytes], cause: Cause) -> None:
        """Note why nodes with these digests can't be found from now on, such as "too_old"."""
        loss: _Loss = (cause, self.now, [])
        for digest in digests:
            self._lost[0].room(1, self._pools[0].num_blocks)[digest] = loss

    def explain(self, prompt: PrefixQuery, sequence: Holder) -> PrefixMiss | None:
        """Return why a sequence that was just started reuses no more of its prompt, or None if it can't.

        Call it once for every request, since it also remembers the prompt's salt.
        """
        root, size, depth = self._other_root(prompt), self._index.block_size, sequence.depth
        last = len(prompt.tokens) - 1
        most = last if prompt.max_reuse is None else min(last, prompt.max_reuse)
        start = depth * size
        rest = prompt.data[start * TOKEN_BYTES : (start + size) * TOKEN_BYTES]
        common = self._index.num_common(sequence.node, rest) if sequence.length < most else size
        if start + common >= most:
            return None if most == last else PrefixMiss(cause="limit", token=most)
        has_next = len(rest) == size * TOKEN_BYTES
        if has_next and self.refuses is not None and self.refuses(prompt, depth):
            return PrefixMiss(cause="format", token=start + common)
        if common == size:
            return self._unusable(prompt, sequence)
        place = start + common
        loss, more = self._lost_next(prompt, sequence, rest, common)
        if loss is not None:
            return self._gone(prompt, depth, place, loss, more)
        if not depth and root is not None and root != prompt.root:
            return PrefixMiss(cause="salt", token=place)
        has_changed = common or (depth and sequence.node.keys)
        return PrefixMiss(cause="changed_text" if has_changed else "new_text", token=place)

    def _other_root(self, prompt: PrefixQuery) -> bytes | None:
        """Return under which root the tenant's last prompt with the same first block was, and remember this.

        Only the tenant's own prompts are remembered, also those with a shared salt.
        """
        size = self._index.block_size
        if len(prompt.tokens) < size:
            return None
        key = (prompt.tenant, prompt.data[: size * TOKEN_BYTES])
        root = self._salts.get(key)
        if root != prompt.root:
            self._salts.room(1, self._pools[0].num_blocks)[key] = prompt.root
        return root

    def _lost_next(
        self, prompt: PrefixQuery, sequence: Holder, rest: bytes, common: int
    ) -> tuple[_Loss | None, int]:
        """Return how the block after a hit was lost, if it had more of the prompt's tokens than is cached.

        Also returns how many more, if it had only the first tokens of the prompt's block.
        """
        if len(rest) == self._index.block_size * TOKEN_BYTES:
            loss = self._loss(self._index.digest_at(prompt, sequence.depth))
            if loss is not None:
                return loss, 0
        if (child := self._children.get(sequence.node.digest)) is None:
            return None, 0
        more = common_tokens(child[1], rest) - common
        return (self._loss(child[0]), more) if more > 0 else (None, 0)

    def _unusable(self, prompt: PrefixQuery, sequence: Holder) -> PrefixMiss:
        """Explain why the block after a hit can't be used although its tokens are in the index."""
        size, depth, place = self._index.block_size, sequence.depth, sequence.length
        nodes = self._index.walk(prompt, (len(prompt.tokens) - 1) // size)[depth:]
        usable = list(takewhile(self._is_whole, nodes))
        if not usable:
            return self._gone(prompt, depth, place, self._loss(nodes[0].digest))
        losses = [loss for node in reversed(usable) if (loss := self._loss(node.digest)) is not None]
        miss = self._gone(prompt, depth, place, losses[0] if losses else None)
        return replace(miss, cause="no_snapshot", lost_tokens=(depth + len(usable)) * size - place)

    def _gone(
        self, prompt: PrefixQuery, depth: int, place: int, loss: _Loss | None, more: int = 0
    ) -> PrefixMiss:
        """Return the miss for blocks after the first `depth` ones that were lost, or for `more` tokens."""
        size, index = self._index.block_size, self._index
        digests = (index.digest_at(prompt, at) for at in range(depth, len(prompt.tokens) // size))
        known = takewhile(lambda one: index.get(one) is not None or self._loss(one) is not None, digests)
        lost_tokens = max(more, (depth + sum(1 for _ in known)) * size - place)
        if loss is None:  # so long ago that nobody remembers
            return PrefixMiss(cause="evicted", token=place, lost_tokens=lost_tokens)
        cause, then, whom = loss
        own = [request for tenant, request in whom if tenant == prompt.tenant]
        whose = own[0] if len(whom) == 1 and own else "several requests" if own else "another tenant"
        return PrefixMiss(
            cause=cause,
            token=place,
            lost_tokens=lost_tokens,
            seconds_ago=max(0.0, self.now - then),
            evicted_for=whose if whom else "",
        )

    def _is_whole(self, node: Node) -> bool:
        """Return True if every layer group without a window that needs a block of a node holds it."""
        return all(
            window is not None or (end is not None and node.depth > end) or block is not None
            for window, end, block in zip(self._windows, self._ends, node.blocks, strict=True)
        )

    def _loss(self, digest: bytes) -> _Loss | None:
        for lost in self._lost:
            if (loss := lost.get(digest)) is not None:
                return loss
        return None
