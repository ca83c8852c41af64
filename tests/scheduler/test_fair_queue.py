"""Nobody waits for another tenant's many or long items."""

import random

import pytest

from kvq.scheduler.fair_queue import FairQueue


def served(queue, cost, turns):
    """Take and charge; what each tenant got, in seconds."""
    got = {}
    for _ in range(turns):
        tenant, item = queue.take()
        queue.charge(tenant, cost(tenant, item))
        got[tenant] = got.get(tenant, 0.0) + cost(tenant, item)
    return got


def num_of(queue, tenant):
    """Items of one tenant that wait."""
    return len(queue._items.get(tenant, ()))


def test_within_a_tenant_first_come_is_first_served():
    queue = FairQueue()
    for i in range(5):
        queue.put("a", i)
    assert [queue.take() for _ in range(6)] == [("a", i) for i in range(5)] + [None]


def test_who_is_put_back_keeps_the_first_place():
    queue = FairQueue()
    for i in range(3):
        queue.put("a", i)
    assert queue.take() == ("a", 0)
    queue.put_back("a", 0)
    assert [queue.take() for _ in range(3)] == [("a", i) for i in range(3)]
    queue.put_back("a", 9)
    assert queue.take() == ("a", 9)
    assert len(queue) == 0


def test_who_is_passed_over_keeps_the_place():
    queue = FairQueue()
    for tenant in "aab":
        queue.put(tenant, tenant)
    assert queue.take(["a"]) == ("b", "b")
    assert queue.take(["a"]) is None
    assert len(queue) == 2
    assert queue.take() == ("a", "a")


def test_one_item_of_another_is_next_however_many_wait():
    queue = FairQueue()
    for i in range(70):
        queue.put("a", i)
    assert queue.take() == ("a", 0)
    queue.charge("a", 1.0)
    queue.put("b", "cheap")
    assert queue.take() == ("b", "cheap")
    assert len(queue) == 69


@pytest.mark.parametrize("seed", range(20))
def test_tenants_that_always_wait_get_the_same_within_their_largest_items(seed):
    rng = random.Random(seed)
    tenants, costs, queue = "abcde", {}, FairQueue()
    for tenant in tenants:
        for i in range(400):
            costs[tenant, i] = rng.uniform(0.001, 0.01 if tenant < "c" else 1.0)
            queue.put(tenant, i)
    got = served(queue, lambda tenant, i: costs[tenant, i], 500)
    assert all(num_of(queue, tenant) for tenant in tenants)
    assert max(got.values()) - min(got.values()) <= 2 * max(costs.values())


def test_nobody_saves_up_turns_by_staying_away_nor_loses_what_was_used():
    queue = FairQueue()
    for i in range(100):
        queue.put("a", i)
    served(queue, lambda tenant, item: 1.0, 50)
    for i in range(50):
        queue.put("b", i)
    got = served(queue, lambda tenant, item: 1.0, 20)
    assert abs(got["a"] - got["b"]) <= 1.0
    queue = FairQueue()
    queue.put("a", 0)
    queue.put("b", 0)
    queue.charge(queue.take()[0], 10.0)
    queue.put("a", 1)
    assert [queue.take()[0] for _ in range(2)] == ["b", "a"], "a is ahead, although it was away for a moment"


def test_an_item_that_leaves_is_not_taken():
    queue, items = FairQueue(), [object() for _ in range(3)]
    for item in items:
        queue.put("a", item)
    assert queue.remove(items[1])
    assert not queue.remove(items[1])
    assert [queue.take()[1] for _ in range(2)] == [items[0], items[2]]
    queue.put("b", items[0])
    assert queue.remove(items[0])
    assert queue.take() is None
    assert len(queue) == 0


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_lose_nothing_and_keep_each_tenants_order(seed):
    rng = random.Random(seed)
    queue, model, number = FairQueue(), {}, 0
    for _ in range(3000):
        tenant, choice = rng.choice("abcdefgh"), rng.random()
        if choice < 0.5:
            queue.put(tenant, number)
            model.setdefault(tenant, []).append(number)
            number += 1
        elif choice < 0.9:
            taken = queue.take()
            assert (taken is None) == (not any(model.values())), "it never holds back what waits"
            if taken is not None:
                assert model[taken[0]].pop(0) == taken[1]
                queue.charge(taken[0], rng.random())
        elif model.get(tenant):
            assert queue.remove(model[tenant].pop(rng.randrange(len(model[tenant]))))
        assert len(queue) == sum(map(len, model.values()))
        assert all(num_of(queue, one) == len(items) for one, items in model.items())


def test_a_million_names_are_not_remembered():
    queue = FairQueue()
    for i in range(10_000):
        queue.put(f"tenant-{i}", i)
        tenant, _ = queue.take()
        queue.charge(tenant, 0.001)
    assert len(queue._used) < 10_000 / 2
