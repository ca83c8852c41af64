"""Memory is divided without more than there is, and equally by users where nothing else is given."""

import random

import pytest

from kvq.errors import OutOfMemory
from kvq.sizing.pools import GPU_FRACTION, pool_budget
from kvq.sizing.shares import EngineNeed, divide_memory

GIB = 1 << 30


def need(name, *, fixed=GIB, user=1 << 20, most=100 * GIB, **given):
    return EngineNeed(name=name, fixed_bytes=fixed, user_bytes=user, most_bytes=most, **given)


def test_equal_models_get_equal_parts_of_what_one_would_get():
    found = divide_memory([need("a"), need("b")], 22 * GIB, on_gpu=True)

    assert found == [int(20 * GIB * GPU_FRACTION) // 2] * 2


def test_models_get_memory_for_as_many_users_as_the_others():
    small, large = divide_memory([need("a", user=3), need("b", user=7)], 12 * GIB, on_gpu=True)

    assert small / 3 == pytest.approx(large / 7)


def test_what_one_model_can_not_use_goes_to_the_others():
    found = divide_memory([need("a"), need("b", most=GIB), need("c")], 43 * GIB, on_gpu=True)

    assert found[1] == GIB
    assert found[0] == found[2] == pytest.approx((int(40 * GIB * GPU_FRACTION) - GIB) / 2, abs=1)


def test_given_shares_come_first():
    given = [need("a", total_bytes=5 * GIB), need("b", kv_bytes=3 * GIB), need("c")]

    found = divide_memory(given, 20 * GIB, on_gpu=True)

    assert found == [4 * GIB, 3 * GIB, int(10 * GIB * GPU_FRACTION)]


def test_a_share_below_the_weights_is_refused_by_name():
    with pytest.raises(OutOfMemory, match=r"memory of b is 512\.0 MiB"):
        divide_memory([need("a"), need("b", total_bytes=GIB // 2)], 64 * GIB, on_gpu=True)


def test_more_than_there_is_is_refused_with_each_model():
    with pytest.raises(OutOfMemory, match=r"more than the 2.00 GiB .*: a 1.00 GiB, b 2.00 GiB"):
        divide_memory([need("a"), need("b", kv_bytes=GIB)], 2 * GIB, on_gpu=True)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_random_models_never_get_more_than_there_is(on_gpu):
    chance = random.Random(5)
    for _ in range(300):
        needs = []
        for i in range(chance.randint(1, 5)):
            given = chance.choice([{}, {}, {"kv_bytes": chance.randint(1, GIB)}, {"total_bytes": 3 * GIB}])
            fixed, most = chance.randint(1, 2 * GIB), chance.randint(1, 40 * GIB)
            needs.append(need(f"{i}", fixed=fixed, user=chance.randint(1, 1 << 24), most=most, **given))
        free = chance.randint(GIB, 80 * GIB)
        try:
            found = divide_memory(needs, free, on_gpu=on_gpu)
        except OutOfMemory:
            continue
        assert sum(found) + sum(one.fixed_bytes for one in needs) <= free
        assert all(
            0 <= kv <= one.most_bytes for kv, one in zip(found, needs, strict=True) if one.kv_bytes is None
        )


def test_one_model_alone_gets_what_a_server_of_one_would():
    [found] = divide_memory([need("a")], 9 * GIB, on_gpu=False)

    assert found == pool_budget(8 * GIB, activation_bytes=0, on_gpu=False)
