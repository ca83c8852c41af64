"""Block lifetimes, idle times and gaps between uses, from a real block manager's events."""

from bisect import bisect_left

import pytest

from kvq.errors import ConfigError
from kvq.server.admission.metric_names import parse_names
from kvq.server.engine.residency import BOUNDS_S, Residency
from tests.blockmgr.helpers import cache, manager


def counted(spread):
    """(bucket, count) where there is any."""
    return [(i, n) for i, n in enumerate(spread.counts) if n]


def test_times_are_those_of_the_clock():
    now = [100.0]
    blocks, watch = manager(4), Residency(lambda: now[0])
    blocks.subscribe(watch)
    cache(blocks, range(4))  # two blocks enter the index
    assert watch.take() is None
    now[0] += 3.0
    blocks.free(blocks.start(blocks.prompt([0, 1, 2, 3, 9])))  # both are found
    now[0] += 0.3
    blocks.free(blocks.start(blocks.prompt([0, 1, 9])))  # the first one
    found = watch.take()
    assert counted(found.reuse_gap) == [(bisect_left(BOUNDS_S, 0.3), 1), (bisect_left(BOUNDS_S, 3.0), 2)]
    assert found.reuse_gap.total_s == pytest.approx(6.3)
    assert watch.evictions == 0
    assert watch.take() is None
    now[0] += 5000.0
    blocks.drop_cached()
    found = watch.take()
    assert watch.evictions == 2
    assert counted(found.lifetime) == counted(found.idle) == [(len(BOUNDS_S), 2)]
    assert found.lifetime.total_s == pytest.approx(2 * 5003.3)
    assert found.idle.total_s == pytest.approx(5000.0 + 5000.3)
    cache(blocks, range(4))  # and they are strangers again
    blocks.drop_cached()
    assert watch.take().lifetime.total_s == 0


def test_kinds_of_names():
    assert parse_names([]) == ("kvq",)
    assert parse_names(["llm", "vllm,kvq"]) == ("kvq", "vllm", "llm")
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        parse_names(["kvq,vlm"])
