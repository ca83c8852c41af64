"""The tree that `kvq simulate` goes by finds what Ray's own does."""

import random
from array import array
from itertools import count

import pytest

from kvq.capacity.fleet.routing import _PrefixTree

ray = pytest.importorskip("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree")
PIECE = _PrefixTree.PIECE


def test_both_trees_know_the_same():
    rng, clock, mine, rays = random.Random(0), count(), _PrefixTree(), ray._PrefixTree()
    rays.add_tenants([str(i) for i in range(4)], 0.0)
    for _ in range(2000):
        pieces = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        prompt = array("I", [piece for piece in pieces for _ in range(PIECE)])
        text = "".join(chr(65 + token) for token in prompt)
        among = sorted(rng.sample(range(4), rng.randint(1, 4)))
        length, holders = mine.match(prompt, among)
        matched, tenants = rays.prefix_match(text, [str(i) for i in among])
        assert length == len(matched)
        if length:
            assert holders == {int(tenant) for tenant in tenants}
        assert mine.smallest(range(4)) == {int(tenant) for tenant in rays.get_smallest_tenants()}
        replica = rng.randrange(4)
        mine.insert(prompt, replica)
        rays.insert(text, str(replica), float(next(clock)))
