"""Who is let in, with a clock and a die of the test's own."""

import random
from contextlib import ExitStack
from types import SimpleNamespace

import msgspec
import pytest

from kvq.blockmgr import PoolUsage
from kvq.engine import SamplingParams
from kvq.scheduler import PoolShape, Reach, SchedulerConfig
from kvq.server.admission.admission import Admission, AdmissionConfig
from kvq.server.admission.rate_limits import TenantLimits
from kvq.server.admission.slots import SequenceSlots
from kvq.server.engine.messages import Gauges, Ready
from kvq.server.http.problems import Problem

POOL = 64  # blocks of 16 tokens


def info(max_context=4096, max_num_seqs=8):
    return Ready(
        model_digest="0" * 16,
        vocab_size=100,
        block_bytes=[1000],
        kv=["int4"],
        shape=PoolShape(num_blocks=[POOL], reaches=[Reach()], block_size=16),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=256, max_context=max_context
        ),
    )


def gauges(live=0, held_up=0):
    usage = PoolUsage(total=POOL, free=POOL - live, cached=0, live=live)
    counts = dict.fromkeys(
        (
            *("running", "waiting", "preempted", "preemptions"),
            *("prompt_tokens", "cached_tokens", "generated_tokens"),
        ),
        0,
    )
    return Gauges(held_up=held_up, pools=[usage], queued_tokens=0, **counts)


class World:
    """An admission whose surroundings the test decides."""

    def __init__(self, limits=None, slots=4, **config):
        self.now, self.die = 0.0, 1.0
        self.engine = SimpleNamespace(gauges=gauges(), num_slots=slots, info=None)
        self.prompts = SimpleNamespace(num_waiting=0)
        self.admission = Admission(
            AdmissionConfig(**config),
            limits,
            engine=self.engine,
            prompts=self.prompts,
            clock=lambda: self.now,
            chance=lambda: self.die,
        )

    def enter(self, tenant="", stack=None, **needed):
        """A request; it ends at once unless there is a stack for it."""
        with ExitStack() as own:
            slots = SequenceSlots(**needed)
            (stack or own).enter_context(self.admission.enter(tenant, slots))
            return slots

    def queue(self, stack, prompt=16, output=16, slots=None, **options):
        """A prompt at the engine, of a request of its own unless its slots are given."""
        params = SamplingParams(max_tokens=output, **options)
        if slots is None:
            slots = self.enter(stack=stack, sequences=params.num_sequences)
        return stack.enter_context(self.admission.queue([1] * prompt, params, info(), slots))

    def status(self, tenant="", stack=None, **needed):
        try:
            self.enter(tenant, stack, **needed)
        except Problem as problem:
            return problem.status
        return 200


def test_an_idle_server_takes_everybody():
    world = World()
    assert [world.status() for _ in range(100)] == [200] * 100
    assert world.admission.load == 0


@pytest.mark.parametrize(("slots", "queue", "needed", "served"), [
    (4, 2, {}, 4),
    (128, 4, {}, 128),
    (1, 1, {}, 1),
    (5, 10, {"sequences": 2}, 2),
    (4, 2, {"sequences": 3}, 1),
    (4, 2, {"prompts": 3}, 2),  # the second has one seat for the first of its prompts
    (3, 2, {"prompts": 64}, 1),
    (5, 1, {"prompts": 2, "sequences": 2}, 1),  # one seat is no use to two sequences
])  # fmt: skip
def test_a_burst_fills_the_seats_and_the_queue_exactly(slots, queue, needed, served):
    """Without a step of the engine in between, and though every chance goes against it."""
    world = World(slots=slots, max_queue=queue)
    world.die = 0.0
    with ExitStack() as stack:
        statuses = [world.status(stack=stack, **needed) for _ in range(served + queue + 3)]
        assert statuses == [200] * (served + queue) + [503] * 3
        assert world.admission.num_waiting == queue
        with pytest.raises(Problem, match=f"{queue} requests wait already"):
            world.admission.check("")
        assert world.admission.load == 1
    assert world.admission.num_waiting == 0


def test_a_seat_is_free_when_its_sequence_has_ended_whoever_still_reads():
    world = World(slots=2, max_queue=1)
    with ExitStack() as stack:
        entry = world.queue(stack, n=2)
        assert [world.status(stack=stack), world.status()] == [200, 503]
        world.admission.started(entry)
        assert world.status() == 503
        world.admission.ended_one(entry)
        assert world.admission.num_waiting == 0
        world.admission.ended(entry)
        assert [world.status(stack=stack) for _ in range(3)] == [200, 200, 503]
        world.admission.ended(entry)  # told again
        assert world.admission.num_waiting == 1


def test_whoever_is_let_in_before_his_turn_leaves_another_waiting():
    world = World(slots=1, max_queue=2)
    with ExitStack() as stack:
        with ExitStack() as first:
            world.queue(first)
            world.queue(stack)  # of batch priority, say
            urgent = world.queue(stack)
        world.admission.started(urgent)
        assert world.admission.num_waiting == 1
        assert [world.status(stack=stack), world.status()] == [200, 503]


class Engine:
    """Lets prompts begin as they came, as far as its slots reach, and takes its time to tell."""

    def __init__(self, slots):
        self.free, self.line, self.untold, self.running = slots, [], [], []

    def step(self):
        while self.line and self.line[0].left <= self.free:
            entry = self.line.pop(0)
            self.free -= entry.left
            self.running.append(entry)
            self.untold.append(entry)

    def remove(self, entry):
        if entry in self.line:
            self.line.remove(entry)
        else:
            self.free += entry.left
            self.running.remove(entry)
            if entry in self.untold:
                self.untold.remove(entry)

    def num_waiting(self):
        running = {entry.slots for entry in self.running}
        return len({entry.slots for entry in self.line} - running)


@pytest.mark.parametrize("seed", range(10))
def test_who_waits_is_who_has_no_seat_at_an_engine_that_takes_them_as_they_come(seed):
    rng = random.Random(seed)
    num_slots, most = rng.randrange(3, 9), rng.randrange(1, 6)
    world, engine = World(slots=num_slots, max_queue=most, max_overcommit=1e9), Engine(num_slots)
    world.die, at_hand, seen = 0.0, [], set()
    for _ in range(2000):
        engine.step()  # which tells nobody yet
        waiting = engine.num_waiting()
        assert world.admission.num_waiting == waiting
        seen.add(waiting)
        chance = rng.random()
        if chance < 0.4:
            prompts, n = rng.choice([(1, 1), (1, 1), (1, 2), (3, 1), (2, 2), (5, 1)])
            stack = ExitStack()
            if world.status(stack=stack, prompts=1) != 200:
                assert waiting == most
                continue
            stack.close()
            assert waiting < most
            slots = world.enter(stack=stack, prompts=prompts, sequences=n)
            entries = [world.queue(stack, slots=slots, n=n) for _ in range(prompts)]
            engine.line += entries
            at_hand.append((stack, entries))
        elif chance < 0.5 and engine.untold:
            world.admission.started(engine.untold.pop(rng.randrange(len(engine.untold))))
        elif chance < 0.8 and engine.running:
            entry = rng.choice(engine.running)
            if entry in engine.untold:
                engine.untold.remove(entry)
                world.admission.started(entry)
            if entry.left > 1 and rng.random() < 0.7:
                engine.free += 1
                world.admission.ended_one(entry)
            else:
                engine.remove(entry)
                world.admission.ended(entry)
        elif at_hand and rng.random() < 0.3:  # a client goes
            stack, entries = at_hand.pop(rng.randrange(len(at_hand)))
            for entry in entries:
                if entry in engine.line or entry in engine.running:
                    engine.remove(entry)
            stack.close()
    assert {0, 1, most} <= seen


def test_requests_that_lack_blocks_wait_though_there_are_seats():
    world = World(slots=100, max_queue=3)
    with ExitStack() as stack:
        for _ in range(10):
            world.queue(stack)
        world.engine.gauges = gauges(held_up=2)
        assert world.admission.num_waiting == 2
        assert world.status() == 200
        world.engine.gauges = gauges(held_up=3)
        with pytest.raises(Problem, match="3 requests wait"):
            world.enter()


def test_estimates_shed_at_random_but_nobody_for_whom_there_is_a_seat():
    world = World(slots=2, max_queue=10, max_queued_tokens=100)
    world.die = 0.0
    with ExitStack() as stack:
        world.queue(stack, prompt=90)
        assert world.admission.load == 0.9
        assert world.status(sequences=2) == 503  # it would have to wait
        assert world.status() == 200
        world.queue(stack, prompt=5)
        world.die = 0.74  # at 0.95, three in four
        with pytest.raises(Problem, match="95% of what may"):
            world.enter()
        world.die = 0.76
        assert world.status() == 200


def test_a_refusal_says_when_to_come_again():
    world = World(max_wait_s=10)
    with ExitStack() as stack:
        entries = [world.queue(stack) for _ in range(40)]
        for entry in entries[:20]:  # two first tokens a second
            world.now += 0.5
            world.admission.started(entry)
        assert world.admission.expected_wait_s == pytest.approx(10, rel=0.1)
        world.prompts.num_waiting = 5
        with pytest.raises(Problem, match=r"a first token takes about 1[12] s") as refused:
            world.enter()
    assert refused.value.status == 503
    assert 11 <= refused.value.retry_after_s <= 13


def test_a_server_that_is_hardly_used_does_not_look_slow():
    world = World(slots=100, max_wait_s=10)
    with ExitStack() as stack:
        for _ in range(20):  # one in half a second, each with its first token in 0.1 s
            entry = world.queue(stack)
            world.now += 0.1
            world.admission.started(entry)
            world.now += 0.4
        for _ in range(60):
            world.queue(stack)
        assert world.admission.expected_wait_s == pytest.approx(6, rel=0.1)
        assert world.status() == 200


def test_rates_of_long_ago_say_nothing():
    world = World(max_wait_s=1)
    with ExitStack() as stack:
        for entry in [world.queue(stack) for _ in range(25)][:20]:
            world.now += 0.5
            world.admission.started(entry)
        assert world.status() == 503
        world.now += 60
        assert world.status() == 200


def test_live_blocks_beyond_the_limit_refuse_cached_ones_do_not():
    world = World()
    world.engine.gauges = gauges(live=60)  # 93.75%
    assert world.status() == 200
    world.engine.gauges = gauges(live=61)
    with pytest.raises(Problem, match="95% of the KV pool"):
        world.enter()


def test_full_staging_areas_refuse_nobody():
    """They have room for those that run: all slots taken is all of them live."""
    world = World()
    world.engine.gauges = gauges(live=10)
    world.engine.gauges.pools.append(PoolUsage(total=2, free=0, cached=0, live=2))
    world.engine.info = SimpleNamespace(is_staging=[False, True])
    assert world.status() == 200
    world.engine.info = SimpleNamespace(is_staging=[])
    assert world.status() == 503


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
            world.enter("key-0", stack)
        assert [world.status(who) for who in ("key-0", "key-1")] == [429, 200]
    assert world.status("key-0") == 200


def test_a_keys_requests_count_as_often_as_they_generate():
    world = World(TenantLimits(max_concurrency=4))

    def enter(tenant, sequences):
        return world.admission.enter(tenant, SequenceSlots(sequences=sequences))

    with enter("a", 3):
        assert world.status("a") == 200
        with pytest.raises(Problem, match="3 sequences running; 4 are allowed") as refused, enter("a", 2):
            pass
    assert refused.value.status == 429
    with pytest.raises(Problem, match="5 sequences at once; 4 are allowed") as refused, enter("a", 5):
        pass
    assert refused.value.status == 400
    with world.admission.tenants["a"].active():  # what the engine does not see counts too
        assert [world.status("a") for _ in range(2)] == [200, 200]
        with pytest.raises(Problem), enter("a", 4):
            pass


def test_before_its_body_is_read_a_request_is_refused_for_what_is_certain_only():
    world = World(TenantLimits(requests_per_minute=2), slots=1, max_queue=2, max_queued_tokens=100)
    with ExitStack() as stack:
        world.queue(stack, prompt=95, slots=world.enter("b", stack))
        world.die = 0.0
        for _ in range(5):
            world.admission.check("a")  # counts nothing
        assert world.status("a") == 503  # shed
        world.die = 1.0
        for who in ("c", "d"):
            world.enter(who, stack)
        with pytest.raises(Problem, match="2 requests wait"):
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
    with world.admission.enter("a", SequenceSlots()):
        world.admission.tenants["a"].charge(250)
    assert world.status("a") == 429
    world.now += 60
    assert world.status("a") == 429
    world.now += 31
    assert world.status("a") == 200


def test_random_comings_and_goings_leave_nothing_behind():

    rng = random.Random(5)
    world = World(slots=5, max_queue=50, max_overcommit=5, max_queued_tokens=2000)
    world.admission._chance = rng.random
    stacks, statuses = [], set()
    for _ in range(3000):
        world.now += rng.random()
        world.engine.gauges = gauges(held_up=rng.randrange(10), live=rng.randrange(POOL))
        if stacks and rng.random() < 0.5:
            stacks.pop(rng.randrange(len(stacks))).close()
        stack = ExitStack()
        try:
            slots = world.enter(f"key-{rng.randrange(3)}", stack)
            entry = world.queue(stack, rng.randrange(1, 400), rng.randrange(1, 400), slots)
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
    world.engine.gauges = gauges()
    assert world.admission.num_waiting == 0
    assert world.admission.load == 0
    assert world.admission._waiting_tokens == 0
    assert world.admission._overcommit == 0
    assert all(tenant.num_active == 0 for tenant in world.admission.tenants.values())


def test_an_engine_that_has_not_stepped_yet_has_no_pressure():
    world = World()
    world.engine.gauges, world.engine.info = None, msgspec.structs.replace(info(), is_staging=[False])

    assert world.admission.kv_pressure == 0
    assert world.status() == 200
