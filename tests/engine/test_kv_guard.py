"""The guard: finds wrong scales and rising divergence, raises no alarm otherwise, and leaks no block."""

import math
import random

import pytest

from kvq import LLM, SamplingParams
from kvq.engine import kv_guard as guard_module
from kvq.engine.kv_guard import Guard
from kvq.errors import ConfigError

PROMPTS = [
    f"A story of {word} and of the sea, of {word} again. " * 6 for word in ("ships", "trees", "stones")
]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=3)


def engine(kv="int4", **options):
    return LLM("tiny", kv=kv, num_blocks=200, guard=1.0, **options)


def idle(llm):
    """What a loop without requests does."""
    while llm.core.upkeep.when_idle():
        pass


def run(llm, prompts=PROMPTS):
    for prompt in prompts:
        llm.generate([prompt], PARAMS)
        idle(llm)
    return llm.core.upkeep.guard.totals


@pytest.mark.parametrize("kv", ["int4", "int8", "int3", "int4_g32_s8_rot", "fp8", "int8+recent=40+sinks=8"])
def test_requests_are_compared(kv):
    with engine(kv) as llm:
        totals = run(llm)
        assert totals.requests == 3
        assert totals.tokens == 3 * 64
        assert totals.alerts == totals.failed == 0
        assert not totals.layers
        assert 0 < totals.kl / totals.tokens < 0.2
        assert 0.5 < totals.same / totals.tokens <= 1
        held = llm.core.scheduler.manager.usage()
        assert all(pool.live == 0 for pool in held), "the guard holds no block any more"


@pytest.mark.parametrize("factor", [0.98, 1.02])
@pytest.mark.parametrize("kv", ["int8_per_token_head", "int4_g64", "int4"])
def test_a_layer_with_wrong_scales_is_named_within_one_request(kv, factor, monkeypatch):
    with engine(kv) as llm:
        core, layer = llm.core, 2
        llm.generate([PROMPTS[0]], PARAMS)
        blocks = core.runner.cache.stores[layer].blocks
        if blocks.k.scales.is_floating_point():
            blocks.k.scales.mul_(factor)
        else:  # scales in 8 bits: what is read back is changed
            scale_what_is_read(monkeypatch, core.runner.cache, layer, factor)
        idle(llm)
        totals = core.upkeep.guard.totals
        assert totals.alerts == 1
        assert list(totals.layers) == [f"layer {layer} k"]
        assert totals.layers[f"layer {layer} k"] == pytest.approx(factor, abs=0.004)
        assert totals.tokens <= 200


def scale_what_is_read(monkeypatch, cache, layer, factor):
    read = guard_module._rows

    def rows(one, sequence, number, *place):
        k, v = read(one, sequence, number, *place)
        return k * (factor if one is cache and number == layer else 1), v

    monkeypatch.setattr(guard_module, "_rows", rows)


def test_no_request_waits_for_it_and_steps_give_a_small_share():
    with engine() as llm:
        core, watched = llm.core, llm.core.upkeep.guard
        run(llm, PROMPTS[:1])
        llm.generate([PROMPTS[1]], PARAMS)
        assert watched.is_busy
        pieces = []
        watched._allowed_s = 0.0  # what real pieces took depends on the machine
        watched._piece = lambda: pieces.append(1) or 0.01
        for _ in range(1000):
            core.upkeep.after_step(0.01)
        assert 0.9 <= 0.01 * len(pieces) / (guard_module._SHARE * 1000 * 0.01) <= 1.2
        core.upkeep.guard.close()
        assert all(pool.live == 0 for pool in core.scheduler.manager.usage())


def lone_guard():
    found = object.__new__(Guard)
    found.totals, found._means, found._usual = guard_module._Totals(), [], (0, 0)
    found._is_drifting, found._work = False, None
    found._window = guard_module.deque(maxlen=guard_module._RECENT)
    return found


def divergences(source, mean):
    """Per-token divergences of a request: heavy-tailed, as on real models."""
    level = mean * math.exp(source.gauss(0, 0.5))
    return [level * math.exp(source.gauss(-0.5, 1)) for _ in range(64)]


def test_false_alarms_are_rarer_than_one_a_day():
    """100 requests a minute, of which 1% are compared, for 5 days of 20 servers."""
    alerts = 0
    for server in range(20):
        found, source = lone_guard(), random.Random(server)
        for _ in range(5 * 24 * 60):
            found._compared(math.log(0.006) + source.gauss(0, 0.55))
        alerts += found.totals.alerts
    assert alerts < 100 / 10


def test_divergence_is_told_by_depth_and_by_tenant_of_a_limited_number():
    found = lone_guard()
    for number in range(2 * guard_module._TENANTS):
        found._count(100 if number % 2 else 1000, f"key-{number % 80}", [0.5, 1.5], 1)
    facts = found.facts()
    assert facts["kl"] == {"64": 1.0, "512": 1.0}
    assert len(facts["kl_by_tenant"]) == guard_module._TENANTS
    assert set(facts["kl_by_tenant"].values()) == {1.0}
    assert facts["tokens"] == 4 * guard_module._TENANTS


@pytest.mark.parametrize("factor", [3, 10])
def test_rising_divergence_is_found(factor):
    found, source = lone_guard(), random.Random(5)
    for _ in range(60):
        found._count(500, "", divergences(source, 0.006), 60)
    assert found.totals.alerts == 0
    for _ in range(2 * guard_module._RECENT):
        found._count(500, "", divergences(source, 0.006 * factor), 60)
    assert found.totals.alerts == 1


def test_options():
    with pytest.raises(ConfigError, match="unquantized"):
        LLM("tiny", kv="fp32", num_blocks=20, guard=0.5)
    with pytest.raises(ConfigError, match="leave out kv_ladder"):
        LLM("tiny", kv="int8", num_blocks=20, guard=0.5, kv_ladder="int4")
    with pytest.raises(ConfigError, match="share of requests"):
        LLM("tiny", kv="int4", num_blocks=20, guard=2)
    with LLM("tiny", kv="int4", num_blocks=20) as llm:
        assert llm.core.upkeep.guard is None


@pytest.mark.parametrize("blocks", [16, 20, 24])
def test_it_gives_up_its_blocks_when_requests_need_them(blocks):
    with LLM("tiny", kv="int4", num_blocks=blocks, guard=1.0) as llm:
        core, long = llm.core, list(range(5, 405))
        for _ in range(3):
            llm.generate([long], PARAMS)
        outputs = llm.generate([[i, *long, *long[: 8 * i]] for i in range(6)], PARAMS)
        assert [one.error for one in outputs] == [None] * 6
        idle(llm)
        assert core.upkeep.guard.totals.failed == 0
        assert all(pool.live == 0 for pool in core.scheduler.manager.usage())


def test_what_fails_in_it_stops_no_step(monkeypatch):
    with engine() as llm:
        monkeypatch.setattr(guard_module, "_rows", lambda *_: 1 / 0)
        totals = run(llm)
        assert (totals.failed, totals.requests) == (3, 0)
        assert all(pool.live == 0 for pool in llm.core.scheduler.manager.usage())
