"""Small engines and loads, drawn from a seed."""

import random

from kvq.capacity.fleet.arrivals import Arrivals
from kvq.capacity.fleet.fleet import FleetSpec
from kvq.capacity.fleet.replica import EngineSpec
from kvq.capacity.fleet.routing import Routing
from kvq.capacity.lengths import Lengths
from kvq.capacity.plan.step_time import StepTime
from kvq.scheduler import SchedulerConfig


def step_time(windows: tuple[int | None, ...] = (None,), *, token_s: float = 1e-4) -> StepTime:
    """A step of 5 ms, more with many tokens, and some for every token seen."""
    return StepTime(
        stage_s=lambda tokens: max(5e-3, tokens * token_s),
        windows=windows,
        read_s=tuple(1e-6 for _ in windows),
        pair_s=tuple(1e-8 for _ in windows),
        sequence_s=1e-5,
    )


def engine(
    num_blocks: int = 200,
    *,
    block_size: int = 16,
    windows: tuple[int | None, ...] = (None,),
    **config: object,
) -> EngineSpec:
    """One engine over pools of one size."""
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_context": 4096} | config
    return EngineSpec(
        num_blocks=[num_blocks] * len(windows),
        block_size=block_size,
        config=SchedulerConfig(**limits),
        time=step_time(windows),
    )


def load(rate: float = 10.0, **more: object) -> Arrivals:
    """Short requests."""
    shape = {
        "input_lengths": Lengths(low=40, high=40, sigma=0.8),
        "output_lengths": Lengths(low=30, high=30, sigma=0.8),
        "max_context": 1000,
    }
    return Arrivals(rate=rate, **(shape | more))


def drawn(seed: int) -> tuple[FleetSpec, Arrivals]:
    """A random small fleet and its load: overload, preemption, reuse, batch requests, windows, routing."""
    rng = random.Random(seed)
    spec = engine(
        rng.randint(8, 80),
        block_size=rng.choice([1, 4, 16]),
        windows=rng.choice([(None,), (None,), (None,), (None, None), (None, 20)]),
        max_num_seqs=rng.randint(1, 16),
        max_num_batched_tokens=rng.choice([16, 64, 256]),
        prefix_caching=rng.random() < 0.7,
        aging_s=rng.choice([0.05, 1.0, 10.0]),
        itl_slo_s=rng.choice([None, None, None, 0.008]),
    )
    fleet = FleetSpec(
        engine=spec,
        replicas=rng.choice([1, 1, 1, 2, 3]),
        routing=rng.choice(list(Routing)),
        prefill_replicas=rng.choice([0, 0, 0, 1]),
        transfer_token_s=1e-5,
        overflow_waiting=rng.choice([None, None, 3]),
    )
    arrivals = load(
        rng.choice([2.0, 10.0, 50.0]),
        shared_prefix=rng.choice([0.0, 0.5]),
        num_prefixes=rng.randint(1, 3),
        turns=rng.choice([1, 1, 3]),
        think_s=rng.choice([0.1, 2.0]),
        batch_share=rng.choice([0.0, 0.3]),
        num_tenants=rng.choice([1, 3]),
    )
    return fleet, arrivals
