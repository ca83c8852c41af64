"""Who is let in, with a clock and a die of the test's own."""

import random
from contextlib import ExitStack

import pytest

from kvq.blockmgr import PoolUsage
from kvq.engine import SamplingParams
from kvq.scheduler import PoolShape, SchedulerConfig
from kvq.server.admission import Admission, AdmissionConfig
from kvq.server.messages import Gauges, Ready
from kvq.server.problems import Problem
from kvq.server.tenants import TenantLimits

POOL = 64  # blocks of 16 tokens


def info(max_context=4096, max_num_seqs=8):
    return Ready(
        vocab_size=100,
        block_bytes=[1000],
        kv=["int4"],
        shape=PoolShape(num_blocks=[POOL], windows=[None], block_size=16),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=256, max_context=max_context
        ),
    )


def gauges(running=0, live=0):
    usage = PoolUsage(total=POOL, free=POOL - live, cached=0, live=live)
    counts = dict.fromkeys(
        ("waiting", "preempted", "preemptions", "prompt_tokens", "cached_tokens", "generated_tokens"), 0
    )
    return Gauges(running=running, pools=[usage], queued_tokens=0, **counts)


class World:
    """An admission whose surroundings the test decides."""

    def __init__(self, limits=None, **config):
        self.now, self.die, self.gauges, self.tokenizing = 0.0, 1.0, gauges(), 0
        self.admission = Admission(
            AdmissionConfig(**config),
            limits,
            gauges=lambda: self.gauges,
            tokenizing=lambda: self.tokenizing,
            clock=lambda: self.now,
            chance=lambda: self.die,
        )

    def enter(self, tenant=""):
        with self.admission.enter(tenant):
            pass

    def queue(self, stack, prompt=16, output=16, **options):
        params = SamplingParams(max_tokens=output, **options)
        return stack.enter_context(self.admission.queue([1] * prompt, params, info()))

    def status(self, tenant=""):
        try:
            self.enter(tenant)
        except Problem as problem:
            return problem.status
        return 200


def test_an_idle_server_takes_everybody():
    world = World()
    assert [world.status() for _ in range(100)] == [200] * 100
    assert world.admission.load == 0


def test_the_queue_is_bounded_and_shed_at_random_before_it_is_full():
    world = World(max_queue=10)
    with ExitStack() as stack:
        for _ in range(8):
            world.queue(stack)
        assert world.status() == 200  # load 0.8
        world.queue(stack)  # load 0.9: one in two
        for die, status in ((0.49, 503), (0.51, 200)):
            world.die = die
            assert world.status() == status
        world.queue(stack)
        world.die = 1.0
        assert world.status() == 503
    assert world.status() == 200


def test_requests_with_blocks_do_not_wait():
    world = World(max_queue=2)
    with ExitStack() as stack:
        for _ in range(2):
            world.queue(stack)
        assert world.status() == 503
        with ExitStack() as more, pytest.raises(Problem, match="2 requests wait"):
            world.queue(more)  # the second prompt of a request that was let in
        world.gauges = gauges(running=2)
        assert world.status() == 200
        world.tokenizing = 2
        assert world.status() == 503


def test_a_refusal_says_when_to_come_again():
    world = World(max_wait_s=10)
    with ExitStack() as stack:
        entries = [world.queue(stack) for _ in range(20)]
        for entry in entries:  # two first tokens a second
            world.now += 0.5
            world.admission.started(entry)
        world.now -= 0.25
        assert world.admission.expected_wait_s == pytest.approx(10, rel=0.1)
        with ExitStack() as more:
            for _ in range(5):
                world.queue(more)
            with pytest.raises(Problem, match="25 requests wait") as refused:
                world.enter()
    assert refused.value.status == 503
    assert 10 <= refused.value.retry_after_s <= 14


def test_rates_of_long_ago_say_nothing():
    world = World(max_wait_s=1)
    with ExitStack() as stack:
        for entry in [world.queue(stack) for _ in range(20)]:
            world.now += 0.5
            world.admission.started(entry)
        assert world.status() == 503
        world.now += 60
        assert world.status() == 200


def test_live_blocks_beyond_the_limit_refuse_cached_ones_do_not():
    world = World()
    world.gauges = gauges(live=60)  # 93.75%
    assert world.status() == 200
    world.gauges = gauges(live=61)
    with pytest.raises(Problem, match="95% of the KV pool"):
        world.enter()


@pytest.mark.parametrize("options", [{"prompt": 5000}, {"output": 1500}, {"output": 200, "n": 6}, {"n": 9}])
def test_what_can_never_fit_is_the_clients_fault(options):
    world = World()
    with ExitStack() as stack, pytest.raises(Problem) as refused:
        world.queue(stack, **options)
    assert refused.value.status == 400
    assert world.admission.num_waiting == 0


def test_worst_cases_are_promised_only_so_often():
    world = World(max_overcommit=2)
    with ExitStack() as stack:
        for _ in range(4):
            world.queue(stack, prompt=16, output=16 * 31 + 1)  # half the pool
        with ExitStack() as more, pytest.raises(Problem, match="may need all") as refused:
            world.queue(more)
    assert refused.value.status == 503
    with ExitStack() as stack:
        world.queue(stack)


def test_prompt_tokens_that_wait_are_bounded_but_one_alone_always_fits():
    world = World(max_queued_tokens=100)
    with ExitStack() as stack:
        first = world.queue(stack, prompt=500)
        with ExitStack() as more, pytest.raises(Problem, match="500 prompt tokens wait"):
            world.queue(more, prompt=10)
        world.admission.started(first)
        world.queue(stack, prompt=90)


def test_one_keys_limits_are_its_own():
    world = World(TenantLimits(max_concurrency=2))
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(world.admission.enter("key-0"))
        assert [world.status(who) for who in ("key-0", "key-1")] == [429, 200]
    assert world.status("key-0") == 200


def test_a_keys_requests_count_as_often_as_they_generate():
    world = World(TenantLimits(max_concurrency=4))
    enter = world.admission.enter
    with enter("a", 3):
        assert world.status("a") == 200
        with pytest.raises(Problem, match="3 sequences running; 4 are allowed") as refused, enter("a", 2):
            pass
    assert refused.value.status == 429
    with pytest.raises(Problem, match="5 sequences at once; 4 are allowed") as refused, enter("a", 5):
        pass
    assert refused.value.status == 400
    with world.admission.enter_aside("a"):  # what the engine does not see counts too
        assert [world.status("a") for _ in range(2)] == [200, 200]
        with pytest.raises(Problem), enter("a", 4):
            pass


def test_before_its_body_is_read_a_request_is_refused_for_what_is_certain_only():
    world = World(TenantLimits(requests_per_minute=2), max_queue=10)
    world.die = 0.0
    with ExitStack() as stack:
        for _ in range(9):
            world.queue(stack)
        for _ in range(5):
            world.admission.check("a")  # counts nothing
        assert world.status("a") == 503  # shed
        world.queue(stack)
        with pytest.raises(Problem, match="10 requests wait"):
            world.admission.check("a")
    assert [world.status("a") for _ in range(3)] == [200, 200, 429]
    with pytest.raises(Problem, match="2 requests a minute"):
        world.admission.check("a")


def test_requests_a_minute_refill_steadily():
    world = World(TenantLimits(requests_per_minute=6))
    assert [world.status("a") for _ in range(7)] == [200] * 6 + [429]
    with pytest.raises(Problem) as refused:
        world.enter("a")
    assert refused.value.retry_after_s == 10
    world.now += 10
    assert [world.status("a") for _ in range(2)] == [200, 429]
    assert world.status("b") == 200


def test_tokens_a_minute_are_paid_afterwards():
    world = World(TenantLimits(tokens_per_minute=100))
    with world.admission.enter("a"):
        world.admission.charge("a", 250)
    assert world.status("a") == 429
    world.now += 60
    assert world.status("a") == 429
    world.now += 31
    assert world.status("a") == 200


def test_random_comings_and_goings_leave_nothing_behind():

    rng = random.Random(5)
    world = World(max_queue=50, max_overcommit=5, max_queued_tokens=2000)
    world.admission._chance = rng.random
    stacks, statuses = [], set()
    for _ in range(3000):
        world.now += rng.random()
        world.gauges = gauges(running=rng.randrange(10), live=rng.randrange(POOL))
        if stacks and rng.random() < 0.5:
            stacks.pop(rng.randrange(len(stacks))).close()
        stack = ExitStack()
        try:
            stack.enter_context(world.admission.enter(f"key-{rng.randrange(3)}"))
            entry = world.queue(stack, prompt=rng.randrange(1, 400), output=rng.randrange(1, 400))
        except Problem as problem:
            statuses.add(problem.status)
            stack.close()
            continue
        if rng.random() < 0.7:
            world.admission.started(entry)
        stacks.append(stack)
    for stack in stacks:
        stack.close()
    assert statuses == {503}
    world.gauges = gauges()
    assert world.admission.num_waiting == 0
    assert world.admission.load == 0
    assert world.admission._waiting_tokens == 0
    assert world.admission._overcommit == 0
    assert all(tenant.num_active == 0 for tenant in world.admission._tenants.values())
