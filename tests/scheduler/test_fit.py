"""What can never fit is refused when it is added; what is taken runs to its end, alone if need be."""

from typing import Any

import pytest

from kvq.blockmgr import BlockManager
from kvq.errors import ConfigError, RequestError
from kvq.scheduler import Reach, most_blocks
from tests.scheduler.helpers import add, ask, drain, make

# prompt, max_tokens, branches, block size, windows, tokens of a step, blocks of the largest pool
EXACT = [
    (13, 8, 1, 4, (None,), 64, 5),  # 20 tokens: the last one needs no slot
    (13, 8, 1, 1, (None,), 64, 20),
    (13, 9, 1, 4, (None,), 64, 6),
    (13, 8, 3, 4, (None,), 64, 3 + 3 * 2),  # three whole blocks once, two more for each branch
    (12, 5, 2, 4, (None,), 64, 3 + 2 * 1),
    (3, 6, 4, 4, (None,), 64, 4 * 2),
    (40, 20, 1, 4, (8,), 8, 5),  # a chunk beside its window, not aligned
    (40, 20, 1, 1, (8,), 3, 12),
    (6, 3, 1, 4, (8,), 8, 2),  # shorter than that
    (13, 8, 1, 4, (None, 6), 64, 5),
    (25, 11, 3, 1, (13,), 3, 17 + 2 * 10),  # the window leaves the shared prompt
    (8, 40, 2, 4, (8,), 2, 4 * 2),  # and in the end shares nothing
]


@pytest.mark.parametrize(("prompt", "max_tokens", "branches", "size", "windows", "batch", "blocks"), EXACT)
def test_the_worst_case_fits_exactly_and_one_block_less_is_refused(
    prompt: int, max_tokens: int, branches: int, size: int, windows: Any, batch: int, blocks: int
) -> None:
    shape: dict[str, Any] = {
        "block_size": size,
        "windows": windows,
        "max_num_batched_tokens": batch,
        "max_num_seqs": branches,
    }
    small = make(blocks - 1, **shape)
    with pytest.raises(RequestError, match=rf"can never fit.* need .*\b{blocks}\b.* has .*\b{blocks - 1}\b"):
        small.add(ask(prompt, max_tokens, num_branches=branches), 0.0)
    assert not small.has_work
    for more in (0, 1):
        scheduler = make(blocks + more, **shape)
        request = ask(prompt, max_tokens, num_branches=branches)
        add(scheduler, request)
        drain(scheduler)
        assert not scheduler.take_failed()
        assert [branch.num_generated for branch in request.branches] == [max_tokens] * branches


@pytest.mark.parametrize(("tokens", "fits"), [(39, True), (40, True), (41, False)])
def test_tokens_below_at_and_above_the_pool(tokens: int, fits: bool) -> None:
    scheduler = make(10, block_size=4)
    request = ask(20, tokens - 20 + 1)
    if fits:
        add(scheduler, request)
        drain(scheduler)
        assert request.branches[0].num_generated == tokens - 19
    else:
        with pytest.raises(RequestError, match="need 11 blocks of 4 tokens, the pool has 10"):
            scheduler.add(request, 0.0)


def test_without_a_limit_a_request_gets_what_context_and_pool_allow() -> None:
    for blocks, context, expected in [(10, 1000, 40 - 20 + 1), (10, 30, 10)]:
        scheduler = make(blocks, max_context=context)
        request = ask(20, None)
        add(scheduler, request)
        assert request.max_tokens == expected
        drain(scheduler)
        assert request.branches[0].num_generated == expected


def test_more_than_the_context_and_more_branches_than_rows_are_refused() -> None:
    scheduler = make(1000, max_context=30, max_num_seqs=3, max_num_batched_tokens=8)
    with pytest.raises(RequestError, match=r"20 prompt tokens and max_tokens=11 .* context of 30"):
        scheduler.add(ask(20, 11), 0.0)
    with pytest.raises(RequestError, match="asks for 4 sequences side by side, the engine runs at most 3"):
        scheduler.add(ask(20, 1, num_branches=4), 0.0)
    assert not scheduler.has_work


def test_a_request_is_added_once_and_has_tokens() -> None:
    scheduler = make()
    request = ask()
    scheduler.add(request, 0.0)
    with pytest.raises(ConfigError, match="added before"):
        scheduler.add(request, 0.0)
    with pytest.raises(ConfigError, match="no prompt tokens"):
        scheduler.add(ask(0), 0.0)


def test_a_request_that_shares_nothing_is_not_charged_for_what_it_could_share() -> None:
    scheduler = make(10, block_size=1)
    add(scheduler, ask(6, 1, first=1))
    drain(scheduler)
    request = ask(6, 2, first=1, max_reuse=0)  # five of its tokens are cached
    add(scheduler, request)
    drain(scheduler)
    assert not scheduler.take_failed()
    assert request.branches[0].num_generated == 2
    assert request.cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "branches", "limit"),
    [(13, 8, 1, 8), (13, 8, 3, 8), (13, 8, 3, 16), (13, 8, 3, 40), (3, 2, 4, 4), (3, 9, 2, 8), (8, 9, 2, 8)],
)
def test_a_limited_group_needs_no_blocks_beyond_its_limit(
    prompt: int, max_tokens: int, branches: int, limit: int
) -> None:
    reaches = [Reach(None, None), Reach(None, limit)]
    _, need = most_blocks(prompt, max_tokens, reaches, 4, 64, num_branches=branches)
    blocks = BlockManager(num_blocks=[64, need], block_size=4, limits=[None, limit])
    first = blocks.new_sequence()
    blocks.append([(first, prompt)])
    blocks.commit(first)
    family = [first, *(blocks.fork(first) for _ in range(branches - 1))]
    blocks.append([(sequence, max_tokens - 1) for sequence in family])
    assert blocks.pools[1].num_live == need


def test_requests_run_where_the_first_tokens_are_kept_apart_and_what_can_never_fit_is_refused() -> None:
    shape: dict[str, Any] = {"windows": (None, 8, None), "limits": (None, None, 12), "max_num_seqs": 4}
    scheduler = make(12, max_num_batched_tokens=8, **shape)
    requests = [ask(20, 9, num_branches=branches) for branches in (1, 2, 1)]
    add(scheduler, *requests)
    drain(scheduler)
    assert not scheduler.take_failed()
    assert all(branch.num_generated == 9 for request in requests for branch in request.branches)
    with pytest.raises(RequestError, match="need 13 and 5 and 3 blocks of 4 tokens, the pool has 12"):
        scheduler.add(ask(40, 11), 0.0)


@pytest.mark.parametrize(("preemptions", "spare"), [(0, [9, 4, 2]), (1, [11, 6, 2]), (4, [25, 6, 2])])
def test_what_must_be_left_over_where_sequences_stop_growing(preemptions: int, spare: list[int]) -> None:
    scheduler = make(64, windows=(None, 12, None), limits=(None, None, 8))
    add(scheduler, ask(4, 9), ask(4, 9))
    scheduler.schedule(0.0)
    request = ask(4, 9)
    request.preemptions = preemptions
    assert scheduler._admission._spare(request, promised=[9, 9, 2]) == spare
