"""Engines and workloads of random shape: small, so that memory is always short."""

import random
from dataclasses import dataclass
from itertools import islice

from kvq.scheduler import FixedCosts, MeasuredCosts, SchedulerConfig
from tests.capacity.harness.faults import Faults
from tests.capacity.harness.records import SimulationResult
from tests.capacity.harness.setup import Pools, Setup
from tests.capacity.harness.simulate import simulate
from tests.capacity.harness.workload import Mix, jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What is not left to the seed; None is."""

    faults: Faults | None = None
    requests: int | None = None  # at most; None for no limit
    rate: float | None = None  # requests per second
    blocks: int | None = None  # per layer group
    block_size: int | None = None  # tokens
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    drafts: int | None = None  # guessed of a sequence in a step, at most


def fuzz(seed: int, *, steps: int, given: Given | None = None) -> SimulationResult:
    """One random engine under one random workload with random faults, all decided by the seed.

    Requests arrive for `steps` steps; those that are there then are served to their end.

    Raises:
        AssertionError: an invariant broke; the message names seed and step.
    """
    rng, given = random.Random(seed), given or Given()
    setup = random_setup(rng, given)
    mix = random_mix(rng, given, setup)
    faults = random_faults(rng)
    return simulate(
        islice(jobs(mix, seed), given.requests),
        setup,
        faults=faults if given.faults is None else given.faults,
        seed=seed,
        max_steps=steps,
        check_every=97,
    )


def random_setup(rng: random.Random, given: Given) -> Setup:
    """A small engine; its scheduler knows what steps cost, or has to learn it."""
    most = min(10, given.max_num_batched_tokens or 10)
    max_num_seqs = given.max_num_seqs or rng.randint(min(2, most), most)
    batched_tokens = max_num_seqs + rng.choice([0, 3, 16, 64])
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens or batched_tokens,
        max_context=rng.choice([30, 100, 200]),
        prefix_caching=rng.random() < 0.85,
        max_step_stretch=rng.choice([1.2, 1.7, 4.0]),
        min_chunk=rng.choice([1, 4, 16]),
        aging_s=rng.choice([0.05, 0.5, 2.0]),
        itl_slo_s=rng.choice([None, None, None, 0.006]),
        ttft_slo_s=rng.choice([None, None, 0.1]),
    )
    estimates = MeasuredCosts() if rng.random() < 0.5 else None
    return Setup(
        pools=random_pools(rng, given),
        config=config,
        costs=FixedCosts(),
        estimates=estimates,
        plans_ahead=rng.random() < 0.5,
        most_drafts=rng.choice([0, 0, 1, 4, 9]) if given.drafts is None else given.drafts,
        guessed_right=rng.choice([0.0, 0.5, 0.9, 1.0]),
    )


def random_pools(rng: random.Random, given: Given) -> Pools:
    """8 to 64 blocks of 1 to 16 tokens; one layer group or two, with sliding windows or without."""
    full: list[int | None] = [None]
    sliding: list[int | None] = [rng.randint(1, 24)]
    windows = rng.choice([full, full, full + sliding, sliding + full, sliding])
    blocks, block_size = rng.randint(8, 64), rng.choice([1, 2, 3, 4, 4, 5, 7, 8, 8, 16])
    num_blocks = [given.blocks or max(8, blocks - rng.randint(0, 8)) for _ in windows]
    return Pools(
        num_blocks=num_blocks,
        block_size=given.block_size or block_size,
        windows=windows,
        has_ladder=rng.random() < 0.5,
        has_cold_host=rng.random() < 0.3,
        host_blocks=rng.randint(0, 80) if rng.random() < 0.8 else 0,
        reserve_blocks=min(rng.choice([0, 0, 1, 3]), min(num_blocks) - 1),
    )


def random_mix(rng: random.Random, given: Given, setup: Setup) -> Mix:
    """Requests of which many fit into memory side by side, and some not at all."""
    pools = setup.pools
    room = min(pools.num_blocks) * pools.block_size
    rate = rng.choice([10.0, 25.0, 50.0])
    return Mix(
        rate=given.rate or rate,
        prompt_tokens=min(24.0, room / rng.choice([6, 12])),
        output_tokens=min(16.0, room / rng.choice([6, 12])),
        longest=min(80, room),
        vocabulary=rng.choice([2, 40]),
        burst_share=rng.choice([0.3, 0.7]),
        prefix_share=rng.choice([0.0, 0.6, 0.9]),
        batch_share=rng.choice([0.0, 0.4, 1.0]),
        branched_share=rng.choice([0.0, 0.3]),
        max_branches=max(2, min(4, setup.config.max_num_seqs)),
        unlimited_share=rng.choice([0.0, 0.05]),
        whole_share=0.1,
        public_share=rng.choice([0.0, 0.5]),
        chunk_share=rng.choice([0.1, 0.6]),
        impatient_share=rng.choice([0.0, 0.2]),
        patience_s=rng.choice([0.02, 0.3]),
        num_tenants=rng.choice([1, 3]),
        end_token=rng.choice([None, 0]),
        session_share=rng.choice([0.0, 0.5, 1.0]),
    )


def random_faults(rng: random.Random) -> Faults:
    """Any of them, often all."""

    def often(probability: float) -> float:
        return probability if rng.random() < 0.6 else 0.0

    return Faults(
        allocation=often(0.01),
        slow_step=often(0.01),
        cancel=often(0.04),
        nan=often(0.01),
        host_corruption=often(0.2),
        preemption=often(0.03),
        pin=often(0.02),
        hint=often(0.1),
    )
