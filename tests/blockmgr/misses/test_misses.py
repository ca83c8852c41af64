"""Every miss gets its right name, place and circumstances, and nothing of another tenant is told."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvq.blockmgr import BlockManager, PrefixMiss, Sequence
from tests.blockmgr.helpers import manager

SIZE = 4


@dataclass
class World:
    """A block manager whose requests have names, and random tokens that no other prompt has."""

    rng: random.Random
    blocks: BlockManager
    next_token: int = 1
    made: list[str] = field(default_factory=list)

    def fresh(self, count: int) -> list[int]:
        """Tokens that nothing has begun with."""
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def ask(self, tokens: list[int], name: str = "", **options: Any) -> tuple[PrefixMiss | None, Sequence]:
        """Start a request, explain its miss and compute all of it."""
        prompt = self.blocks.prompt(tokens, **options)
        sequence = self.blocks.start(prompt)
        sequence.request = name
        miss = self.blocks.misses.explain(prompt, sequence)
        self.blocks.append([(sequence, len(tokens) - sequence.length)])
        self.blocks.commit(sequence)
        self.blocks.take_orders()
        return miss, sequence

    def done(self, tokens: list[int], name: str = "", **options: Any) -> PrefixMiss | None:
        """The same, ended: its whole blocks stay cached."""
        miss, sequence = self.ask(tokens, name, **options)
        self.blocks.free(sequence)
        return miss

    def length(self, least: int = 2, most: int = 12) -> int:
        """A number of tokens that are rarely whole blocks."""
        return self.rng.randint(least * SIZE, most * SIZE)

    def fill(self, name: str, tenant: str) -> None:
        """Take the whole pool for a moment, which evicts everything cached."""
        total = min(pool.num_blocks for pool in self.blocks.pools)
        self.done(self.fresh(total * SIZE), name, tenant=tenant)


def world(seed: int, *, size: int = 64, **options: Any) -> World:
    count = len(options.get("windows", [None]))
    return World(random.Random(seed), manager(*[size] * count, size=SIZE, **options))


def whole(length: int) -> int:
    """Tokens of whole blocks."""
    return length // SIZE * SIZE


def new_text(w: World) -> None:
    w.done(first := w.fresh(whole(w.length())), tenant="a")
    miss = w.done(first + w.fresh(w.length()), tenant="a")
    assert miss == PrefixMiss(cause="new_text", token=len(first))


def cold(w: World) -> None:
    tokens = w.fresh(w.length())
    assert w.done(tokens, tenant="a") == PrefixMiss(cause="new_text", token=0)


def same_again(w: World) -> None:
    tokens = w.fresh(whole(w.length()))
    w.done(tokens, tenant="a")
    assert w.done(tokens, tenant="a") is None


def changed(w: World) -> None:
    tokens = w.fresh(whole(w.length()))
    at = w.rng.randrange(1, len(tokens))
    w.done(tokens, tenant="a")
    other = tokens[:at] + w.fresh(w.length())
    assert w.done(other, tenant="a") == PrefixMiss(cause="changed_text", token=at)


def one_token_changed(w: World) -> None:
    tokens = w.fresh(whole(w.length()))
    at = w.rng.randrange(1, len(tokens) - 1)
    w.done(tokens, tenant="a")
    other = tokens[:at] + w.fresh(1) + tokens[at + 1 :]
    assert w.done(other, tenant="a") == PrefixMiss(cause="changed_text", token=at)


def changed_within_a_copied_part(w: World) -> None:
    """Of many siblings the nearest counts."""
    tokens = w.fresh(2 * SIZE)
    for _ in range(w.rng.randint(1, 5)):
        w.done(tokens[:SIZE] + w.fresh(SIZE), tenant="a")
    w.done(tokens, tenant="a")
    at = SIZE + w.rng.randint(1, SIZE - 1)
    other = tokens[:at] + w.fresh(SIZE)
    assert w.done(other, tenant="a") == PrefixMiss(cause="changed_text", token=at)


def salt(w: World) -> None:
    tokens = w.fresh(w.length())
    first, second = w.rng.sample([("x", None), ("y", None), (None, "x"), (None, "z"), (None, None)], 2)
    w.done(tokens, tenant="a", cache_salt=first[0], shared_salt=first[1])
    miss = w.done(tokens, tenant="a", cache_salt=second[0], shared_salt=second[1])
    assert miss == PrefixMiss(cause="salt", token=0)


def limit(w: World) -> None:
    tokens = w.fresh(w.length())
    w.done(tokens, tenant="a")
    most = w.rng.randrange(len(tokens) - SIZE)
    assert w.done(tokens, tenant="a", max_reuse=most) == PrefixMiss(cause="limit", token=most)


def evicted(w: World) -> None:
    tokens = w.fresh(whole(w.length()))
    w.blocks.misses.now = 10.0
    w.done(tokens, tenant="a")
    mine = w.rng.random() < 0.5
    w.blocks.misses.now = 12.0
    w.fill("big", "a" if mine else "b")
    w.blocks.misses.now = 15.5
    miss = w.done(tokens + w.fresh(3), tenant="a")
    whose = "big" if mine else "another tenant"
    assert miss == PrefixMiss(
        cause="evicted", token=0, lost_tokens=len(tokens), seconds_ago=3.5, evicted_for=whose
    )


def evicted_in_the_middle(w: World) -> None:
    """The deepest blocks go first; what is left is found."""
    w.blocks.drop_cached()
    tokens = w.fresh(whole(w.length(4)))
    w.done(tokens, tenant="a")
    gone = w.rng.randint(1, len(tokens) // SIZE - 1)
    free = w.blocks.pools[0].num_free
    w.done(w.fresh((free + gone) * SIZE), "big", tenant="a")
    miss = w.done(tokens + w.fresh(2), tenant="a")
    left = len(tokens) - gone * SIZE
    assert miss is not None
    assert (miss.cause, miss.token, miss.lost_tokens) == ("evicted", left, gone * SIZE)
    assert miss.evicted_for == "big"


def evicted_part(w: World) -> None:
    """The beginning of a block was cached, and the block is gone."""
    w.blocks.drop_cached()
    tokens = w.fresh(2 * SIZE)
    w.done(tokens, tenant="a")
    free = w.blocks.pools[0].num_free
    w.done(w.fresh((free + 1) * SIZE), "big", tenant="a")
    common = w.rng.randint(1, SIZE - 1)
    miss = w.done(tokens[: SIZE + common] + w.fresh(1), tenant="a")
    assert miss is not None
    assert (miss.cause, miss.token, miss.lost_tokens) == ("evicted", SIZE, common)


def dropped_for_nobody(w: World) -> None:
    tokens = w.fresh(whole(w.length()))
    w.done(tokens, tenant="a")
    w.blocks.drop_cached()
    miss = w.done(tokens, tenant="a")
    assert miss is not None
    assert (miss.cause, miss.evicted_for) == ("evicted", "")


def too_old(w: World) -> None:
    tokens = w.fresh(whole(w.length()))
    prompt = w.blocks.prompt(tokens, tenant="a")
    w.done(tokens, tenant="a")
    w.blocks.drop_cached()
    w.blocks.misses.now = 20.0
    index = w.blocks.blocks.index
    w.blocks.misses.lose([index.digest_at(prompt, i) for i in range(len(tokens) // SIZE)], "too_old")
    w.blocks.misses.now = 21.0
    miss = w.done(tokens, tenant="a")
    assert miss == PrefixMiss(cause="too_old", token=0, lost_tokens=len(tokens), seconds_ago=1.0)


def other_format(w: World) -> None:
    tokens = w.fresh(whole(w.length()))
    known = [tokens[:SIZE]]
    w.blocks.misses.refuses = lambda prompt, index: prompt.tokens[:SIZE].tolist() in known
    assert w.done(tokens, tenant="a") == PrefixMiss(cause="format", token=0)
    assert w.done(w.fresh(SIZE), tenant="a") == PrefixMiss(cause="new_text", token=0)
    w.blocks.misses.refuses = None


MAKERS: list[Callable[[World], None]] = [
    new_text,
    cold,
    same_again,
    changed,
    one_token_changed,
    changed_within_a_copied_part,
    salt,
    limit,
    evicted,
    evicted_in_the_middle,
    evicted_part,
    dropped_for_nobody,
    too_old,
    other_format,
]


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_made_misses_are_each_named_right(seed: int) -> None:
    w = world(seed)
    for number in range(100):
        maker = MAKERS[number % len(MAKERS)] if number < len(MAKERS) else w.rng.choice(MAKERS)
        try:
            maker(w)
        except AssertionError as error:
            raise AssertionError(f"{maker.__name__}, number {number}: {error}") from error
    w.blocks.check_integrity()


def states(seed: int) -> World:
    """A world with tokens in one layer group and recurrent states in another."""
    return world(seed, windows=[None, 2], state_group=1, snapshot_every=4 * SIZE)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_without_a_state_lack_a_snapshot(seed: int) -> None:
    w = states(seed)
    tokens = w.fresh(w.rng.randint(6, 12) * SIZE + 1)
    w.done(tokens, tenant="a")
    at = w.rng.randint(1, 3)  # before the first snapshot
    miss = w.done(tokens[: at * SIZE + 2], tenant="a")
    assert miss == PrefixMiss(cause="no_snapshot", token=0, lost_tokens=at * SIZE)


@pytest.mark.parametrize("seed", range(20))
def test_an_added_turn_after_a_snapshot_is_new_text(seed: int) -> None:
    w = states(seed)
    tokens = w.fresh(w.rng.randint(6, 12) * SIZE + 1)
    w.done(tokens, tenant="a")
    miss = w.done(tokens[:-1] + w.fresh(w.length()), tenant="a")
    assert miss == PrefixMiss(cause="new_text", token=len(tokens) - 1)
    assert w.done(tokens, tenant="a") is None, "a token after a whole block is computed anyway"


def test_an_evicted_snapshot_is_told_with_its_time() -> None:
    w = world(1, windows=[None, 2], state_group=1, snapshot_every=100 * SIZE)
    w.blocks = manager(64, 4, size=SIZE, windows=[None, 2], state_group=1, snapshot_every=100 * SIZE)
    tokens = w.fresh(6 * SIZE + 1)
    w.done(tokens, tenant="a")
    w.blocks.misses.now = 5.0
    for _ in range(5):
        w.done(w.fresh(2 * SIZE + 1), "small", tenant="b")
    w.blocks.misses.now = 7.0
    miss = w.done(tokens, tenant="a")
    assert miss == PrefixMiss(
        cause="no_snapshot",
        token=0,
        lost_tokens=6 * SIZE,
        seconds_ago=2.0,
        evicted_for="another tenant",
    )


def test_a_window_that_is_gone_lacks_a_snapshot() -> None:
    w = world(1, windows=[None, 2 * SIZE])
    tokens = w.fresh(8 * SIZE)
    w.done(tokens, tenant="a")
    pool = w.blocks.pools[1]
    for block in pool.cached_blocks()[:]:
        if pool.entry(block) is not None:
            pool.forget(block)
    miss = w.done(tokens, tenant="a")
    assert miss is not None
    assert (miss.cause, miss.token, miss.lost_tokens) == ("no_snapshot", 0, 7 * SIZE)


def test_several_that_take_at_once_are_not_blamed_one_by_one() -> None:
    for others, whose in ((("a", "b"), "several requests"), (("b", "c"), "another tenant")):
        w = world(3, size=8)
        tokens = w.fresh(8 * SIZE)
        w.done(tokens, tenant="a")
        work = []
        for tenant in others:
            sequence = w.blocks.start(w.blocks.prompt(w.fresh(4 * SIZE), tenant=tenant))
            sequence.request = f"of {tenant}"
            work.append((sequence, 4 * SIZE))
        w.blocks.append(work)
        for sequence, _ in work:
            w.blocks.free(sequence)
        miss = w.done(tokens, tenant="a")
        assert miss is not None
        assert miss.evicted_for == whose


def prompts(rng: random.Random) -> Iterator[list[int]]:
    """Prompts over few tokens, so that many begin alike."""
    while True:
        yield [rng.randint(1, 2) for _ in range(rng.randint(1, 5 * SIZE))]


@pytest.mark.parametrize("seed", range(30))
def test_what_another_tenant_sends_changes_no_explanation(seed: int) -> None:
    """Two worlds differ in the other tenant's prompts alone, with a pool where nothing has to leave."""
    told = []
    for others in ("none", "same", "different"):
        w, rng = world(seed, size=4096), random.Random(seed)
        also, found = random.Random(-seed), []
        for _, tokens in zip(range(40), prompts(rng), strict=False):
            salt = rng.choice([None, "x"])
            if others == "same":
                w.done(tokens, tenant="b", cache_salt=salt)
            elif others == "different":
                w.done(next(prompts(also)), tenant="b", cache_salt=also.choice([None, "x", "y"]))
            found.append(w.done(tokens, tenant="a", cache_salt=salt))
        told.append(found)
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("seed", range(10))
def test_an_evicting_tenant_is_told_by_nothing_but_these_words(seed: int) -> None:
    w = world(seed, size=16)
    for _, tokens in zip(range(200), prompts(w.rng), strict=False):
        tenant = w.rng.choice("ab")
        miss = w.done(tokens, f"request of {tenant}", tenant=tenant)
        if miss is not None:
            assert miss.evicted_for in ("", f"request of {tenant}", "another tenant", "several requests")


def test_a_shared_salt_of_another_tenant_is_not_told() -> None:
    w = world(1)
    tokens = w.fresh(4 * SIZE)
    w.done(tokens, tenant="b", shared_salt="public")
    assert w.done(tokens, tenant="a") == PrefixMiss(cause="new_text", token=0)


@pytest.mark.parametrize("windows", [[None], [None, 2]])
def test_the_memory_is_bounded_by_the_pools(windows: list[int | None]) -> None:
    w = world(5, size=16, windows=windows)
    total = sum(pool.num_blocks for pool in w.blocks.pools)
    for _ in range(500):
        w.done(w.fresh(w.length(1, 12)), tenant=str(w.rng.random()))
        assert len(w.blocks.misses) <= 2 * (total + 16 + 16) + 2 * 16
    assert len(w.blocks.misses) > total, "it remembers nothing"


def test_placed_in_a_chat() -> None:
    texts = [(5, 10), (14, 20), (20, 19), (26, 30)]

    def at(token: int, cause: Any = "changed_text") -> tuple[str, int | None, str]:
        miss = PrefixMiss(cause=cause, token=token).placed(texts)
        return miss.cause, miss.message, miss.part

    assert at(0) == ("template", 1, "template")
    assert at(5) == ("changed_text", 1, "text")
    assert at(10) == ("changed_text", 1, "text")
    assert at(11) == ("template", 2, "template")
    assert at(23) == ("template", 4, "template")
    assert at(31) == ("template", None, "template")
    assert at(12, "new_text") == ("new_text", 2, "template")
    assert at(0, "evicted") == ("evicted", 1, "template")
    miss = PrefixMiss(cause="changed_text", token=0)
    assert miss.placed([]) is miss
    assert miss.facts() == {"cause": "changed_text", "token": 0}
