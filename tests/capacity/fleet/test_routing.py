"""Ray's routers: what they choose, by the tree of prefixes and by load."""

import random
from array import array
from types import SimpleNamespace

import pytest

from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.fleet.faults import Faults
from kvq.capacity.fleet.fleet import FleetSpec, serve
from kvq.capacity.fleet.routing import MOST_AHEAD, Routing, _PrefixTree, make_router
from tests.capacity.fleet.kit import engine, load

PIECE = _PrefixTree.PIECE


def call(*pieces: int, tail: int = 3) -> Call:
    """A prompt of whole pieces, told apart by numbers, and a few tokens more."""
    prompt = array("I", [piece for piece in pieces for _ in range(PIECE)] + [9] * tail)
    return Call(number=0, arrival_s=0.0, prompt=prompt, output_tokens=1)


def replicas(*loads: int) -> list:
    return [
        SimpleNamespace(index=i, live=range(load), gauges=SimpleNamespace(restarts=0))
        for i, load in enumerate(loads)
    ]


def test_the_tree_finds_what_comparing_all_prompts_finds():
    rng, tree, sent = random.Random(0), _PrefixTree(), []
    for _ in range(500):
        asked = [rng.randrange(2) for _ in range(rng.randrange(6))]
        among = set(rng.sample(range(4), rng.randint(1, 4)))
        alike = {
            i: max((common(asked, pieces) for pieces, replica in sent if replica == i), default=0)
            for i in among
        }
        length, holders = tree.match(call(*asked).prompt, among)
        longest = max(alike.values())
        assert length == PIECE * longest
        if length:
            assert holders == {i for i in among if alike[i] == longest}
        replica = rng.randrange(4)
        tree.insert(call(*asked).prompt, replica)
        sent.append((asked, replica))
        if rng.random() < 0.02:
            tree.remove(replica)
            sent = [one for one in sent if one[1] != replica]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_tree_forgets_the_oldest_ends_first():
    tree = _PrefixTree(most_tokens=4 * PIECE)
    tree.insert(call(1, 2, 3).prompt, 0)
    tree.insert(call(1, 4).prompt, 0)
    assert tree.match(call(1, 2, 3).prompt, {0})[0] == 3 * PIECE
    tree.insert(call(1, 5).prompt, 0)
    assert tree.match(call(1, 2, 3).prompt, {0})[0] == 2 * PIECE
    assert tree.match(call(1, 4).prompt, {0})[0] == 2 * PIECE
    for i in range(100):
        tree.insert(call(100 + i).prompt, 0)
    assert tree.match(call(1).prompt, {0})[0] == 0
    assert len(tree._root.children) == 4


def test_affinity_goes_where_the_prefix_went_and_spreads_what_is_new():
    choose, three = make_router(Routing.AFFINITY), replicas(0, 0, 0)
    homes = [choose(call(i, i, 50 + i), three).index for i in range(3)]
    assert sorted(homes) == [0, 1, 2]
    for _ in range(3):
        assert [choose(call(i, i, 60 + i), three).index for i in range(3)] == homes


def test_affinity_needs_a_tenth_of_the_prompt_and_balance():
    choose = make_router(Routing.AFFINITY)
    home = choose(call(*[1] * 2), replicas(0, 0)).index
    other = 1 - home
    busy = replicas(*[MOST_AHEAD if i == home else 0 for i in (0, 1)])
    assert choose(call(*[1] * 2), busy).index == home
    busier = replicas(*[MOST_AHEAD + 1 if i == home else 0 for i in (0, 1)])
    assert choose(call(*[1] * 2), busier).index == other
    choose = make_router(Routing.AFFINITY)
    home = choose(call(1, 2, 3), replicas(0, 0)).index
    assert choose(call(1, *range(100, 140)), replicas(0, 0)).index != home  # one piece of 41 is too little


def test_affinity_forgets_a_replica_that_came_back():
    choose, three = make_router(Routing.AFFINITY), replicas(0, 0, 0)
    homes = {choose(call(i, i), three).index: i for i in (1, 2)}
    empty = ({0, 1, 2} - homes.keys()).pop()
    ended, kept = homes
    three[ended].live = range(1)
    assert choose(call(homes[ended], homes[ended]), three).index == ended
    three[ended].gauges.restarts = 1
    assert choose(call(homes[kept], homes[kept]), three).index == kept
    assert choose(call(homes[ended], homes[ended]), three).index == empty  # it had few, and has less to do


def test_two_choices_take_the_less_loaded_of_two():
    choose, three = make_router(Routing.TWO_CHOICES), replicas(5, 3, 1)
    found = [choose(call(1), three).index for _ in range(300)]
    assert 0 not in found
    assert found.count(2) > 1.5 * found.count(1) > 100
    assert choose(call(1), replicas(7)).index == 0


@pytest.mark.parametrize("routing", [Routing.TWO_CHOICES, Routing.AFFINITY])
def test_the_seed_decides_and_faults_are_borne(routing: Routing):
    arrivals = load(20.0, shared_prefix=0.5, num_prefixes=5)

    def digest(seed: int) -> str:
        faults = Faults(seed=1, life_s=2.0)
        spec = FleetSpec(engine=engine(), replicas=3, routing=routing, faults=faults, seed=seed)
        return serve(arrivals.calls(200, 0), spec).digest

    assert digest(0) == digest(0)
    if routing is Routing.TWO_CHOICES:
        assert len({digest(seed) for seed in range(4)}) > 1


def test_affinity_finds_more_prefixes_than_turns_do():
    arrivals = load(20.0, shared_prefix=0.8, num_prefixes=12)
    spec = engine(num_blocks=100)

    def reused(routing: Routing) -> int:
        run = serve(arrivals.calls(300, 0), FleetSpec(engine=spec, replicas=3, routing=routing))
        return sum(run.records.cached_tokens)

    assert reused(Routing.AFFINITY) > 1.3 * reused(Routing.ROUND_ROBIN)
