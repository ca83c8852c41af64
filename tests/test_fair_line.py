"""Nobody waits for another tenant's many or long items."""

import random

import pytest

from kvq.fair_line import FairLine


def served(line, cost, turns):
    """Take and charge; what each tenant got, in seconds."""
    got = {}
    for _ in range(turns):
        tenant, item = line.take()
        line.charge(tenant, cost(tenant, item))
        got[tenant] = got.get(tenant, 0.0) + cost(tenant, item)
    return got


def num_of(line, tenant):
    """Items of one tenant that wait."""
    return len(line._items.get(tenant, ()))


def test_within_a_tenant_first_come_is_first_served():
    line = FairLine()
    for i in range(5):
        line.put("a", i)
    assert [line.take() for _ in range(6)] == [("a", i) for i in range(5)] + [None]


def test_who_is_put_back_keeps_the_first_place():
    line = FairLine()
    for i in range(3):
        line.put("a", i)
    assert line.take() == ("a", 0)
    line.put_back("a", 0)
    assert [line.take() for _ in range(3)] == [("a", i) for i in range(3)]
    line.put_back("a", 9)
    assert line.take() == ("a", 9)
    assert len(line) == 0


def test_who_is_passed_over_keeps_the_place():
    line = FairLine()
    for tenant in "aab":
        line.put(tenant, tenant)
    assert line.take(["a"]) == ("b", "b")
    assert line.take(["a"]) is None
    assert len(line) == 2
    assert line.take() == ("a", "a")


def test_one_item_of_another_is_next_however_many_wait():
    line = FairLine()
    for i in range(70):
        line.put("a", i)
    assert line.take() == ("a", 0)
    line.charge("a", 1.0)
    line.put("b", "cheap")
    assert line.take() == ("b", "cheap")
    assert len(line) == 69


@pytest.mark.parametrize("seed", range(20))
def test_tenants_that_always_wait_get_the_same_within_their_largest_items(seed):
    rng = random.Random(seed)
    tenants, costs, line = "abcde", {}, FairLine()
    for tenant in tenants:
        for i in range(400):
            costs[tenant, i] = rng.uniform(0.001, 0.01 if tenant < "c" else 1.0)
            line.put(tenant, i)
    got = served(line, lambda tenant, i: costs[tenant, i], 500)
    assert all(num_of(line, tenant) for tenant in tenants)
    assert max(got.values()) - min(got.values()) <= 2 * max(costs.values())


def test_nobody_saves_up_turns_by_staying_away_nor_loses_what_was_used():
    line = FairLine()
    for i in range(100):
        line.put("a", i)
    served(line, lambda tenant, item: 1.0, 50)
    for i in range(50):
        line.put("b", i)
    got = served(line, lambda tenant, item: 1.0, 20)
    assert abs(got["a"] - got["b"]) <= 1.0
    line = FairLine()
    line.put("a", 0)
    line.put("b", 0)
    line.charge(line.take()[0], 10.0)
    line.put("a", 1)
    assert [line.take()[0] for _ in range(2)] == ["b", "a"], "a is ahead, although it was away for a moment"


def test_an_item_that_leaves_is_not_taken():
    line, items = FairLine(), [object() for _ in range(3)]
    for item in items:
        line.put("a", item)
    assert line.remove(items[1])
    assert not line.remove(items[1])
    assert [line.take()[1] for _ in range(2)] == [items[0], items[2]]
    line.put("b", items[0])
    assert line.remove(items[0])
    assert line.take() is None
    assert len(line) == 0


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_lose_nothing_and_keep_each_tenants_order(seed):
    rng = random.Random(seed)
    line, model, number = FairLine(), {}, 0
    for _ in range(3000):
        tenant, choice = rng.choice("abcdefgh"), rng.random()
        if choice < 0.5:
            line.put(tenant, number)
            model.setdefault(tenant, []).append(number)
            number += 1
        elif choice < 0.9:
            taken = line.take()
            assert (taken is None) == (not any(model.values())), "it never holds back what waits"
            if taken is not None:
                assert model[taken[0]].pop(0) == taken[1]
                line.charge(taken[0], rng.random())
        elif model.get(tenant):
            assert line.remove(model[tenant].pop(rng.randrange(len(model[tenant]))))
        assert len(line) == sum(map(len, model.values()))
        assert all(num_of(line, one) == len(items) for one, items in model.items())


def test_a_million_names_are_not_remembered():
    line = FairLine()
    for i in range(10_000):
        line.put(f"tenant-{i}", i)
        tenant, _ = line.take()
        line.charge(tenant, 0.001)
    assert len(line._used) < 10_000 / 2
