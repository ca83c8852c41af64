"""A model without weights over a cache without tensors: what it says depends on all the KV that it reads.

The KV of a token is a number, its key: a hash of the token, its position and, per layer group, the sum
of the keys that it attends to, as they lie in the cache. Whoever reads a slot that is unwritten, stale
or another's gets other keys, and from there on other tokens.
"""

from array import array
from collections.abc import Callable, Collection
from typing import Protocol

from kvq.blockmgr import BlockId, Copy, Demote, Fill, Order, Scrub
from kvq.blockmgr.packed.ladder import Pack, Packed
from kvq.scheduler import StepPlan
from kvq.tiers.tiers import Tiers
from tests.capacity.harness.answers import attend, choose
from tests.capacity.harness.setup import Pools

Guess = Callable[[int], int]  # the right token -> a draft
POISON = 1 << 33  # what an unwritten, scrubbed or lost slot holds; keys are below 2**32
BROKEN = 1 << 34  # what a step wrote that went wrong
PACKED = 1 << 35  # and more: the number of an extent, in all its slots


def _rightly(token: int) -> int:
    return token


class TokenSource(Protocol):
    """Carries out plans."""

    windows: list[int | None]  # per layer group, what a key depends on
    tiers: Tiers | None  # of the block manager whose orders it carries out

    def run(self, plan: StepPlan, bad: Collection[int], guess: Guess = _rightly) -> list[list[int]]:
        """For every branch of a plan the keys of its last token and of its drafts, which `guess` fills in.

        `bad` branches go wrong.
        """


class BlindModel:
    """Reads nothing, for long contexts: keys depend on the newest token and its position only."""

    windows: list[int | None] = []  # noqa: RUF012 - never changed
    tiers: Tiers | None = None

    def run(self, plan: StepPlan, bad: Collection[int], guess: Guess = _rightly) -> list[list[int]]:
        """The keys."""
        keys, at = [], 0
        for i, (count, end) in enumerate(zip(plan.counts, plan.ends, strict=True)):
            at += count
            drafts = plan.drafts[i]
            mine, guesses = [attend([], plan.token_ids[at - drafts - 1], end - drafts - 1)], []
            for position in range(end - drafts, end):
                guesses.append(guess(choose(mine[-1])))
                mine.append(attend([], guesses[-1], position))
            plan.guess(i, guesses)
            keys.append(mine)
        return keys


class FakeModel:
    """Reads all that it may see, through tables that learn only what `table_changes` say."""

    def __init__(self, pools: Pools, max_num_seqs: int) -> None:
        self.windows = pools.windows
        self._size = size = pools.block_size
        self._kv = [[[POISON] * size for _ in range(count)] for count in pools.num_blocks]
        self._packed: list[list[list[int]]] = []  # what was packed, by number of extent and slot
        self.tiers: Tiers | None = None
        self._rows: list[list[list[BlockId]]] = [[[] for _ in pools.windows] for _ in range(max_num_seqs)]
        self._is_tainted = False  # True once any step went wrong

    def run(self, plan: StepPlan, bad: Collection[int], guess: Guess = _rightly) -> list[list[int]]:
        """Orders, tables, then every branch in turn."""
        for order in plan.orders:
            self._carry_out(order)
        for row, group, first, entries in plan.table_changes:
            table = self._rows[row][group]
            assert first <= len(table), f"row {row} was never told its first {first} entries"
            table[first : first + len(entries)] = entries  # what lies behind stays as it was
        keys, at = [], 0
        for i, branch in enumerate(plan.branches):
            assert branch.row is not None, "a branch that runs has a row"
            count, drafts = plan.counts[i], plan.drafts[i]
            start, tokens = plan.ends[i] - count, plan.token_ids[at : at + count - drafts]
            guesses: list[int] = []
            if i in bad:
                self._is_tainted, new = True, [BROKEN] * count
                guesses = [0] * drafts
            else:
                new = self._forward(self._rows[branch.row], start, tokens)
                for _ in range(drafts):
                    guesses.append(guess(choose(new[-1])))
                    new = self._forward(self._rows[branch.row], start, [*tokens, *guesses])
            plan.guess(i, guesses)
            self._write(self._rows[branch.row], start, new)
            keys.append(new[count - drafts - 1 :])
            at += count
        return keys

    def _carry_out(self, order: Order) -> None:
        kv = self._kv[order.group]
        match order:
            case Copy(source=source, target=target):
                kv[target] = kv[source][:]
            case Demote(source=source, key=key, form=form):
                assert self.tiers is not None
                self.tiers.put(key, array("q", self._content(kv, source)).tobytes(), form)
            case Pack(sources=sources, targets=targets):
                self._packed.append([self._content(kv, source)[:] for source in sources])
                for block in targets:
                    kv[block] = [PACKED + len(self._packed) - 1] * self._size
            case Fill(block=block, content=Packed() as content):
                kv[block] = self._content(kv, content)[:]
            case Fill(block=block, content=content):
                kv[block] = array("q", content).tolist()
            case Scrub(block=block):
                kv[block] = [POISON] * self._size

    def _content(self, kv: list[list[int]], source: BlockId | Packed) -> list[int]:
        """What a block holds, or a packed one."""
        if not isinstance(source, Packed):
            return kv[source]
        number = kv[source.blocks[0]][0]
        assert all(kv[block] == [number] * self._size for block in source.blocks), "an extent was overwritten"
        return self._packed[number - PACKED][source.slot]

    def _forward(self, tables: list[list[BlockId]], start: int, tokens: list[int]) -> list[int]:
        """The keys of new tokens; those before them are read from the cache."""
        seen = [self._read(group, table, start) for group, table in enumerate(tables)]
        sums = [sum(keys) for keys in seen]
        new: list[int] = []
        for position, token in enumerate(tokens, start):
            key = attend(sums, token, position)
            new.append(key)
            for group, window in enumerate(self.windows):
                sums[group] += key
                if window is not None:  # the next token no longer sees the first of them
                    seen[group].append(key)
                    if len(seen[group]) >= window:
                        sums[group] -= seen[group].pop(0)
        return new

    def _read(self, group: int, table: list[BlockId], start: int) -> list[int]:
        """The keys before position `start` that a token there sees, as the cache holds them."""
        size, window, kv = self._size, self.windows[group], self._kv[group]
        first = 0 if window is None else max(0, start - window + 1)
        at = first // size
        keys: list[int] = []
        for block in table[at : -(-start // size)]:
            keys += kv[block]
        # A weight of zero times NaN is NaN: what is masked must not be broken either.
        assert not self._is_tainted or BROKEN not in keys, "a block holds what a failed step wrote"
        return keys[first - at * size : start - at * size]

    def _write(self, tables: list[list[BlockId]], start: int, keys: list[int]) -> None:
        size = self._size
        for kv, table in zip(self._kv, tables, strict=True):
            for position, key in enumerate(keys, start):
                kv[table[position // size]][position % size] = key
