"""How many drafts are made: as many as pay, by what was seen; none while decodes have to be measured."""

from array import array

import pytest

from kvq.scheduler import Branch, FixedCosts, MeasuredCosts, Priority, Request
from kvq.scheduler.draft_depth import Depth, _Seen, drafts_allowed
from tests.scheduler.helpers import add, ask, make, step


def branches(count: int) -> list[Branch]:
    return [
        Branch(request=Request(id=str(i), tokens=array("I", (1,)), max_tokens=9), tokens=array("I", (1,)))
        for i in range(count)
    ]


def depth(step_s: float, row_s: float, *, pass_s: float = 0.0) -> Depth:
    """Of steps that take `step_s` and `row_s` for each token, and passes of a draft that take so long."""
    found = Depth(FixedCosts(step_s=step_s, decode_token_s=row_s), takes_passes=pass_s > 0)
    for _ in range(10):
        if pass_s:
            found.draft_s.observe(1, pass_s)
    return found


def test_free_drafts_are_all_made_and_dear_ones_none():
    [branch] = branches(1)
    assert depth(1.0, 0.0).choose({branch: 4}, 1) == {branch: 4}
    assert depth(0.0, 1.0).choose({branch: 4}, 1) == {}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("row_s", [0.05, 0.2])
@pytest.mark.parametrize("pass_s", [0.0, 0.1, 0.4])
def test_the_depth_is_the_one_with_most_tokens_a_second(share, row_s, pass_s):
    [branch] = branches(1)
    one = depth(1.0, row_s, pass_s=pass_s)
    one.seen = _Seen(looked_at=1e9, right=share * 1e9)
    rates = {k: sum(share**j for j in range(k + 1)) / (1 + row_s * (1 + k) + pass_s * k) for k in range(7)}
    best = max(rates, key=lambda k: rates[k])
    chosen = one.choose({branch: 6}, 1).get(branch, 0)
    assert rates[chosen] >= max(rates.values()) / 1.021
    assert abs(chosen - best) <= 1


def test_a_sequence_whose_drafts_are_right_gets_more_of_them():
    good, bad = branches(2)
    one = depth(1.0, 0.2)
    for _ in range(100):
        one.learn(good, 4, 4)
        one.learn(bad, 4, 0)
    chosen = one.choose({good: 4, bad: 4}, 2)
    assert chosen[good] > chosen.get(bad, 0)


def test_after_failures_drafts_are_tried_again_some_time():
    [branch] = branches(1)
    one = depth(1.0, 0.35)
    while one.choose({branch: 4}, 1):
        one.learn(branch, 4, 0)
    for waited in range(2000):  # noqa: B007 - it is what is looked for
        if one.choose({branch: 4}, 1):
            break
    assert 10 < waited < 1000, "they are tried again, and not at once"


def test_a_large_batch_is_not_slowed_down_to_find_out():
    """Before any draft was checked, prompts have shown what a token costs."""
    costs = MeasuredCosts()
    for _ in range(50):
        costs.observe(num_decodes=32, prefill_tokens=0, depth=0, seconds=0.020)
        costs.observe(num_decodes=32, prefill_tokens=64, depth=0, seconds=0.060)
        costs.observe(num_decodes=1, prefill_tokens=0, depth=0, seconds=0.015)
    one, many = Depth(costs, takes_passes=False), branches(32)
    one.seen = _Seen(looked_at=1e9, right=0.5e9)
    assert one.choose(dict.fromkeys(many, 4), 32) == {}
    assert one.choose({many[0]: 4}, 1)[many[0]] >= 3


@pytest.mark.parametrize("adapts", [True, False])
def test_none_while_decodes_of_that_number_have_to_be_measured_alone(adapts: bool):
    """Prefill waits for that, and would for ever if every step had drafts."""
    costs, [one] = MeasuredCosts(), branches(1)
    decider = Depth(costs, False, adapts=adapts)
    for _ in range(3):
        assert decider.choose({one: 4}, 1) == {}
        assert not decider.rests
        costs.observe(num_decodes=1, prefill_tokens=0, depth=10, seconds=10e-3)
    assert decider.choose({one: 4}, 1) == {one: 4}
    assert costs.prefill_share(1) > 0
    assert decider.choose({one: 4}, 40) == {}


def test_a_step_that_was_worth_none_is_followed_by_some_that_are_not_asked_about():
    decider, [one] = depth(0.0, 1e-3), branches(1)
    assert not decider.choose({one: 4}, 1)
    rests = decider.rests
    assert rests > 4
    decider.rest(rests - 1)
    decider.rest()
    assert decider.rests == 0
    decider.costs = FixedCosts(step_s=10e-3, decode_token_s=1e-5)
    assert decider.choose({one: 4}, 1)
    assert decider.rests == 0
    assert not decider.choose({one: 4}, 0)
    assert decider.rests == 0, "behind a prefill alone come decodes"


def test_drafts_are_allowed_to_those_who_go_on_by_a_token_and_up_to_their_last():
    scheduler = make(max_num_batched_tokens=16, max_num_seqs=4)
    streaming, ending, prefilling = ask(4, 20), ask(4, 3), ask(40, 20)
    add(scheduler, streaming, ending)
    step(scheduler)
    add(scheduler, prefilling)
    step(scheduler)
    assert drafts_allowed(scheduler, 4) == {streaming.branches[0]: 4, ending.branches[0]: 0}
    assert drafts_allowed(scheduler, 40)[streaming.branches[0]] == 17


def test_none_are_allowed_while_a_prompt_waits_for_nothing_but_a_part_of_a_step():
    scheduler = make(max_num_batched_tokens=8, max_num_seqs=4)
    streaming = ask(4, 20)
    add(scheduler, streaming)
    step(scheduler)
    assert drafts_allowed(scheduler, 4) == {streaming.branches[0]: 4}
    add(scheduler, ask(12, 2, priority=Priority.BATCH), ask(8, 2, priority=Priority.BATCH))
    seen = []
    while len(scheduler.waiting) or not seen:
        step(scheduler)
        seen.append(drafts_allowed(scheduler, 4)[streaming.branches[0]])
    assert 0 in seen[:-1]
    assert seen[-1] == 4


def test_who_waits_for_a_seat_or_for_blocks_keeps_nobody_from_drafts():
    for scheduler in (make(max_num_seqs=1), make(num_blocks=8, max_num_seqs=4)):
        streaming = ask(4, 20)
        add(scheduler, streaming)
        step(scheduler)
        add(scheduler, ask(27, 4))
        step(scheduler)
        assert len(scheduler.waiting) == 1
        assert drafts_allowed(scheduler, 4) == {streaming.branches[0]: 4}
