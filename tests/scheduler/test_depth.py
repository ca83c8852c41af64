"""How many drafts are made: as many as pay, none while decodes have to be measured, asked now and then."""

import pytest

from kvq.scheduler import FixedCosts, MeasuredCosts
from kvq.scheduler.depth import Depth, drafts_allowed
from tests.scheduler.helpers import add, ask, make, step

READS = FixedCosts(step_s=10e-3, decode_token_s=1e-5)  # a draft costs next to nothing
MULTIPLIES = FixedCosts(step_s=0.0, decode_token_s=1e-3)  # as much as a token


def branches(number: int) -> list:
    scheduler = make()
    requests = [ask(max_tokens=50) for _ in range(number)]
    add(scheduler, *requests)
    step(scheduler)
    return [request.branches[0] for request in requests]


def test_as_many_as_pay():
    two = branches(2)
    most = dict.fromkeys(two, 4)
    assert Depth(READS, False).choose(most, 2) == most
    assert Depth(MULTIPLIES, False).choose(most, 2) == {}
    assert Depth(MULTIPLIES, False, adapts=False).choose(most, 2) == most
    assert 0 < sum(Depth(READS, True, draft_share=0.3).choose(most, 2).values()) < 8


def test_whose_drafts_are_right_gets_more():
    often, never = branches(2)
    depth = Depth(FixedCosts(step_s=10e-3, decode_token_s=2e-3), False)
    for _ in range(50):
        depth.learn(often, 4, 4)
        depth.learn(never, 4, 0)
    chosen = depth.choose({often: 4, never: 4}, 2)
    assert chosen[often] == 4
    assert never not in chosen


@pytest.mark.parametrize("adapts", [True, False])
def test_none_while_decodes_of_that_number_have_to_be_measured_alone(adapts: bool):
    """Prefill waits for that, and would for ever if every step had drafts."""
    costs, [one] = MeasuredCosts(), branches(1)
    depth = Depth(costs, False, adapts=adapts)
    for _ in range(3):
        assert depth.choose({one: 4}, 1) == {}
        assert not depth.rests
        costs.observe(num_decodes=1, prefill_tokens=0, depth=10, seconds=10e-3)
    assert depth.choose({one: 4}, 1) == {one: 4}
    assert costs.prefill_share(1) > 0
    assert depth.choose({one: 4}, 40) == {}


def test_a_step_that_was_worth_none_is_followed_by_some_that_are_not_asked_about():
    depth, [one] = Depth(MULTIPLIES, False), branches(1)
    assert not depth.choose({one: 4}, 1)
    rests = depth.rests
    assert rests > 4
    depth.rest(rests - 1)
    depth.rest()
    assert depth.rests == 0
    depth.costs = READS
    assert depth.choose({one: 4}, 1)
    assert depth.rests == 0
    assert not depth.choose({one: 4}, 0)
    assert depth.rests == 0, "behind a prefill alone come decodes"


def test_drafts_are_allowed_to_those_who_go_on_by_a_token_and_up_to_their_last():
    scheduler = make(max_num_batched_tokens=16, max_num_seqs=4)
    streaming, ending, prefilling = ask(4, 20), ask(4, 3), ask(40, 20)
    add(scheduler, streaming, ending)
    step(scheduler)
    add(scheduler, prefilling)
    step(scheduler)
    assert drafts_allowed(scheduler, 4) == {streaming.branches[0]: 4, ending.branches[0]: 0}
    assert drafts_allowed(scheduler, 40)[streaming.branches[0]] == 17
