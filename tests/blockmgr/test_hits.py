"""Whose prefixes are found: tenants, shared salts, what is computed right now, and adopted prefixes."""

import random

import pytest

from kvq.blockmgr import BlockManager, Sequence
from kvq.errors import ConfigError, OutOfBlocks, RequestError
from tests.blockmgr.helpers import cache, compute, hit, manager, run


def test_no_tenant_hits_another_in_1000_pairs_of_equal_prompts() -> None:
    rng = random.Random(6)
    blocks = manager(64, 64, windows=[None, 6])
    for number in range(1000):
        tokens = [number, *(rng.randrange(50) for _ in range(rng.randint(3, 20)))]
        own = run(blocks, tokens, "a")
        assert hit(blocks, tokens, "b") == 0
        other = run(blocks, tokens, "b")
        for group in range(2):
            mine, theirs = (set(s.tables[group][s.starts[group] :]) for s in (own, other))
            assert mine
            assert not mine & theirs
        assert hit(blocks, tokens, "a") == hit(blocks, tokens, "b") == len(tokens) - 1
        blocks.free(own)
        blocks.free(other)
    blocks.check_integrity()


def test_a_shared_salt_hits_across_tenants_and_only_under_its_name() -> None:
    blocks = manager(40)
    cache(blocks, range(6), "a", salt="common")
    assert hit(blocks, range(6), "b", salt="common") == 5
    assert hit(blocks, range(6), "a", salt="other") == 0
    assert hit(blocks, range(6), "a") == 0
    assert hit(blocks, range(6), "common") == 0  # a tenant can't name itself after a salt
    cache(blocks, range(6), "x")
    assert hit(blocks, range(6), "a", salt="x") == 0


def test_a_cache_salt_keeps_a_tenants_prefixes_apart() -> None:
    blocks = manager(60)

    def length(tenant, salt, shared=None):
        prompt = blocks.prompt(range(6), tenant=tenant, cache_salt=salt, shared_salt=shared)
        return blocks.lookup(prompt).length

    sequence = blocks.start(blocks.prompt(range(6), tenant="a", cache_salt="x"))
    compute(blocks, sequence)
    blocks.free(sequence)
    assert length("a", "x") == 5
    for tenant, salt, shared in (("a", None, None), ("a", "y", None), ("b", "x", None), ("b", None, "x")):
        assert length(tenant, salt, shared) == 0
    roots = {  # no cut of tenant and salt is another's
        blocks.prompt([1], tenant=tenant, cache_salt=salt).root
        for tenant, salt in (("ab", "c"), ("a", "bc"), ("abc", None), ("", "abc"), ("c", "ab"))
    }
    assert len(roots) == 5


def test_another_identity_has_other_digests() -> None:
    roots = {
        manager(4, identity=identity).prompt([1], tenant=tenant).root
        for identity in (b"", b"model", b"model2")
        for tenant in ("", "a", "\ud800")
    }
    assert len(roots) == 9


def test_digests_are_visible_only_after_commit() -> None:
    blocks = manager(8)
    sequence = blocks.start(blocks.prompt(range(5)))
    blocks.append([(sequence, 5)])
    assert hit(blocks, range(5)) == 0
    blocks.commit(sequence)
    assert hit(blocks, range(5)) == 4


def test_a_start_without_reuse_computes_everything_and_is_found_again() -> None:
    blocks = manager(8)
    cache(blocks, range(4))
    sequence = blocks.start(blocks.prompt(range(4), max_reuse=0))
    assert (sequence.length, sequence.receipt.reused) == (0, 0)
    compute(blocks, sequence)
    assert sequence.tables == [[0, 1]]  # its copy gave way to the known one
    assert blocks.usage()[0].live == 2


def test_equal_prefixes_computed_side_by_side_end_up_in_one_copy() -> None:
    blocks = manager(12, 12, windows=[None, 8])
    prompt = blocks.prompt(range(7))
    twins = [blocks.start(prompt) for _ in range(3)]
    blocks.append([(twin, 7) for twin in twins])
    assert blocks.usage()[0].live == 12
    for twin in twins:
        blocks.commit(twin)
    assert [usage.live for usage in blocks.usage()] == [3 + 3, 3 + 3]
    assert all(twin.tables[0][:3] == twins[0].tables[0][:3] for twin in twins)
    blocks.check_integrity()


def waited_for(blocks: BlockManager, tokens: range, tenant: str = "") -> Sequence | None:
    return blocks.lookup(blocks.prompt(tokens, tenant=tenant)).waits_for


def test_waits_for_names_who_computes_the_next_block() -> None:
    blocks = manager(12)
    first = blocks.start(blocks.prompt(range(6)))
    assert waited_for(blocks, range(9)) is first
    assert waited_for(blocks, range(3)) is first  # 0 and 1 can be had
    assert waited_for(blocks, range(2)) is None  # one token must be computed anyway
    assert waited_for(blocks, range(9), "b") is None
    assert waited_for(blocks, range(1, 9)) is None
    blocks.append([(first, 3)])
    assert waited_for(blocks, range(3)) is first  # written, and not known to be good
    blocks.commit(first)
    assert waited_for(blocks, range(3)) is None
    assert waited_for(blocks, range(5)) is first
    blocks.append([(first, 3)])
    blocks.commit(first)
    assert waited_for(blocks, range(9)) is None  # what comes after its prompt it does not promise


@pytest.mark.parametrize("end", ["free", "scrub", "truncate"])
def test_nobody_waits_for_a_request_that_stopped(end: str) -> None:
    blocks = manager(12)
    first = blocks.start(blocks.prompt(range(8)))
    blocks.append([(first, 2)])
    blocks.commit(first)
    assert waited_for(blocks, range(8)) is first
    getattr(blocks, end)(first, *([1] if end == "truncate" else []))
    assert waited_for(blocks, range(8)) is None
    blocks.check_integrity()
    second = blocks.start(blocks.prompt(range(8)))
    assert waited_for(blocks, range(8)) is second


def test_one_waits_for_a_block_that_is_computed_again_although_deeper_ones_are_known() -> None:
    blocks = manager(8, 8, windows=[None, 8])
    cache(blocks, range(6))
    blocks.pools[0].drop_cached()  # the sliding group still knows all three blocks
    assert hit(blocks, range(6)) == 0
    again = blocks.start(blocks.prompt(range(6)))
    assert waited_for(blocks, range(6)) is again


def test_a_digest_collision_makes_nobody_wait() -> None:
    blocks = manager(12, digest=lambda data: b"the same for all")
    blocks.start(blocks.prompt([1, 2, 3, 4], tenant="a"))
    assert waited_for(blocks, range(5), "a") is None
    assert blocks.lookup(blocks.prompt([1, 2, 3, 4], tenant="b")).waits_for is None
    assert blocks.lookup(blocks.prompt([1, 2, 3, 4], tenant="a")).waits_for is not None


def test_an_adopted_prefix_holds_what_its_windows_see_and_is_indexed_at_commit() -> None:
    blocks = manager(9, 9, windows=[None, 4])
    prompt = blocks.prompt(range(9))
    sequence = blocks.adopt(prompt, 8)
    assert (sequence.length, sequence.committed, sequence.starts) == (8, 0, [0, 2])
    assert [usage.live for usage in blocks.usage()] == [4, 2]
    assert blocks.lookup(prompt).length == 0
    blocks.check_integrity()
    blocks.commit(sequence)
    blocks.check_integrity()
    blocks.free(sequence)
    assert blocks.lookup(prompt).length == 8
    assert blocks.prefixes.held(prompt)[:2] == (8, [0, 2])


def test_an_adopted_prefix_freed_without_commit_leaves_nothing() -> None:
    blocks = manager(9)
    blocks.free(blocks.adopt(blocks.prompt(range(8)), 8))
    assert blocks.usage()[0].free == 9
    assert hit(blocks, range(8)) == 0


def test_adopting_needs_whole_blocks_within_the_prompt_and_room() -> None:
    blocks = manager(3)
    prompt = blocks.prompt(range(9))
    for length in (3, -2, 10):
        with pytest.raises(ConfigError, match=f"multiple of the block size 2 and at most .* got {length}"):
            blocks.adopt(prompt, length)
    with pytest.raises(OutOfBlocks, match="need 4 blocks"):
        blocks.adopt(prompt, 8)
    assert blocks.sequences() == []
    assert blocks.adopt(prompt, 0).length == 0


def test_a_held_prefix_covers_a_whole_prompt_in_whole_blocks() -> None:
    blocks = manager(9, 9, windows=[None, 3])
    run(blocks, range(8))
    length, starts, tables = blocks.prefixes.held(blocks.prompt(range(8)))
    assert (length, starts) == (8, [0, 3])
    assert [len(table) for table in tables] == [4, 4]
    assert blocks.prefixes.held(blocks.prompt(range(7)))[0] == 6
    assert blocks.prefixes.held(blocks.prompt([9, 9])) == (0, [0, 0], [[], []])


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["1"], [None]])
def test_token_ids_that_are_none_are_refused_and_nothing_changes(bad: list[int]) -> None:
    blocks = manager(4)
    with pytest.raises(RequestError, match="whole numbers from 0"):
        blocks.prompt(bad)
    sequence = run(blocks, [1, 2])
    blocks.append([(sequence, 1)])
    with pytest.raises(RequestError, match="whole numbers from 0"):
        blocks.commit(sequence, bad)
    assert (sequence.committed, list(sequence.tokens)) == (2, [1, 2])


def test_nobody_waits_for_a_request_that_a_digest_collision_stopped_indexing() -> None:
    blocks = manager(12, digest=lambda data: bytes([data[-4] % 5]))  # by the last token of a block
    cache(blocks, [8, 4])
    sequence = blocks.start(blocks.prompt([1, 9, 2, 6]))  # its first block collides with 8, 4
    assert blocks.lookup(blocks.prompt([1, 9, 2])).waits_for is sequence
    blocks.append([(sequence, 2)])
    blocks.commit(sequence)
    assert not sequence.indexing
    assert sequence.announced == []
    assert blocks.prefixes.computing() == {}


def test_a_prompt_stays_as_it_is_while_its_requests_go_on() -> None:
    blocks = manager(12)
    prompt = blocks.prompt(range(3))
    for sampled in (5, 6):
        sequence = blocks.start(prompt)
        compute(blocks, sequence, [sampled])
        assert list(sequence.tokens) == [0, 1, 2, sampled]
    assert list(prompt.tokens) == [0, 1, 2]


def test_an_adopted_prefix_takes_blocks_of_a_limited_group_up_to_its_limit() -> None:
    blocks = manager(9, 9, 9, windows=[None, 3, None], limits=[None, None, 4])
    prompt = blocks.prompt(range(9))
    sequence = blocks.adopt(prompt, 8)
    assert (sequence.starts, [len(table) for table in sequence.tables]) == ([0, 3, 0], [4, 4, 2])
    assert sequence.receipt.own == 4 + 1 + 2
    blocks.commit(sequence)
    blocks.free(sequence)
    assert blocks.prefixes.held(prompt)[2][2] == [0, 1]
    assert hit(blocks, range(9)) == 8


def test_an_adopted_prefix_is_old_enough_to_be_indexed_whole() -> None:
    """Whoever kept it had it from the index; what is written after it waits for its own time."""
    options = {"windows": [None, 5], "lag": 3}
    kept = manager(9, 9, **options)
    cache(kept, range(12))
    length, starts, _ = kept.prefixes.held(kept.prompt(range(12)))
    assert (length, starts) == (8, [0, 2])
    blocks = manager(9, 9, **options)
    prompt = blocks.prompt(range(12))
    sequence = blocks.adopt(prompt, length)
    assert sequence.starts == starts
    blocks.commit(sequence)
    blocks.check_integrity()
    assert hit(blocks, range(12)) == 8
    blocks.append([(sequence, 4)])
    blocks.commit(sequence)
    assert sequence.depth == 4
    blocks.free(sequence)
    blocks.check_integrity()


def test_of_an_adopted_prefix_that_was_cut_nothing_new_is_indexed_before_its_time() -> None:
    blocks = manager(9, 9, windows=[None, 16], lag=3)
    sequence = blocks.adopt(blocks.prompt(range(8)), 8)
    blocks.truncate(sequence, 5)
    blocks.commit(sequence, [70, 71, 72])
    blocks.append([(sequence, 3)])
    blocks.commit(sequence)
    assert (sequence.committed, sequence.depth) == (8, 2)


def test_a_pin_keeps_a_limited_groups_blocks() -> None:
    blocks = manager(20, 20, limits=[None, 4])
    cache(blocks, range(10))
    assert blocks.pin(blocks.prompt(range(10)), 1.0) == 10
    assert [usage.live for usage in blocks.usage()] == [5, 2]
    blocks.drop_cached()
    assert hit(blocks, range(11)) == 10


@pytest.mark.parametrize("states", [False, True])
def test_a_prefix_that_was_shared_outlasts_those_that_were_not_in_a_small_window_pool(states: bool) -> None:
    group = {"state_group": 1, "snapshot_every": 4} if states else {}
    blocks = manager(400, 12, size=2, windows=[None, 2 if states else 4], **group)
    shared = list(range(100, 109))
    for turn in range(3):  # computed, then found twice
        cache(blocks, [*shared, turn])
        assert hit(blocks, [*shared, 99]) >= 8
    for other in range(40):
        cache(blocks, [1000 * other + i for i in range(9)])
    assert hit(blocks, [*shared, 99]) >= 8
    assert hit(blocks, [1000 + i for i in range(9)]) == 0, "the pool was not small enough"


def test_prefixes_that_were_shared_leave_room_for_new_ones() -> None:
    blocks = manager(400, 12, size=2, windows=[None, 4])
    for prompt in range(20):
        for turn in range(3):
            cache(blocks, [1000 * prompt + i for i in range(8)] + [7000 + turn])
    fresh = [9000 + i for i in range(8)]
    cache(blocks, [*fresh, 1])
    assert hit(blocks, [*fresh, 2]) == 8
    assert hit(blocks, [19000 + i for i in range(8)] + [3]) == 8
    assert hit(blocks, [*range(8), 3]) == 0
