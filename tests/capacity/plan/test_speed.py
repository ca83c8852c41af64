"""Speed and cost as people compute them on paper."""

import pytest

from kvq.capacity.plan.cost import (
    Prices,
    break_even_requests,
    monthly_usd,
    requests_a_month,
    usd_per_million,
)
from kvq.capacity.plan.speed import closed_loop
from kvq.capacity.plan.step_time import (
    Efficiency,
    _Machine,
    expert_share,
)
from kvq.errors import ConfigError

PERFECT = Efficiency(bandwidth=1, step=1, arithmetic=1)


def test_an_h100_reads_14_gb_of_weights():
    machine = _Machine(bandwidth=3.35e12, flops=989e12, efficiency=PERFECT)
    step = machine.linear_s(14e9, 2 * 7e9, tokens=1)
    assert 1e3 * step == pytest.approx(4.2, abs=0.05)
    assert 238 <= 1 / step <= 240


@pytest.mark.parametrize(("context", "wanted"), [(0, 320), (1024, 93), (4096, 30)])
def test_an_a100_with_16_requests(context, wanted):
    machine = _Machine(bandwidth=2e12, flops=312e12, efficiency=Efficiency(bandwidth=0.8, step=0.7))
    kv = 16 * context * 524_288
    step = machine.linear_s(3.5e9, 2 * 7e9 * 16, tokens=16) + machine.read_s(kv)
    assert 1 / step == pytest.approx(wanted, rel=0.02)


def test_what_is_not_bound_by_bytes_is_bound_by_arithmetic():
    machine = _Machine(bandwidth=1e12, flops=1e12, efficiency=PERFECT)
    assert machine.linear_s(1e12, 1e11, tokens=1) == 1
    assert machine.linear_s(1e11, 2e12, tokens=1) == 2


def test_experts_that_a_step_reads():
    assert expert_share(8, 2, 1) == 0.25
    assert expert_share(128, 8, 10_000) == pytest.approx(1)
    assert expert_share(0, 0, 5) == 0


def test_users_that_take_turns():
    found = closed_loop(users=10, step_s=0.02, prefill_s=0.1, output_tokens=100)
    assert found.itl_s == pytest.approx(0.03)
    assert found.tokens_per_s == pytest.approx(333.3, abs=0.1)
    seconds = found.itl_s * 100
    assert found.requests_per_s * seconds == pytest.approx(found.users)  # Little's law


def test_costs():
    assert usd_per_million(64, 3000) == pytest.approx(5.93, abs=5e-3)
    assert usd_per_million(64, 3000, utilization=0.5) == pytest.approx(11.85, abs=5e-3)
    assert 1e6 * Prices(input=5, output=30).request_usd(500, 200) == pytest.approx(8500)
    assert Prices(input=5, output=30).request_usd(500, 200) == pytest.approx(0.0085)
    assert break_even_requests(10_640, 0.0085) / 1e6 == pytest.approx(1.252, abs=5e-4)
    assert requests_a_month(50) == 129.6e6
    assert requests_a_month(50, utilization=0.7) == pytest.approx(90.7e6, rel=1e-3)
    assert monthly_usd(2, gpus=4, operations_usd=240) == 6000


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: usd_per_million(0, 1),
        lambda: usd_per_million(1, -1),
        lambda: usd_per_million(1, float("nan")),
        lambda: usd_per_million(1, 1, utilization=1.5),
        lambda: Prices(input=-1, output=1),
        lambda: Efficiency(bandwidth=0),
    ],
)
def test_numbers_that_are_none_are_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
