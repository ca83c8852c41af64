"""`kvq bench blocks`: cost of block memory operations with the prefix index on, and block utilization."""

import random
from array import array
from collections.abc import Callable
from functools import partial
from statistics import fmean
from time import perf_counter_ns
from typing import Any, TypeVar

from kvq.bench.timing import percentile
from kvq.blockmgr import BlockManager, BlockPool, Match, PrefixQuery, Sequence
from kvq.evals.watch import UNWATCHED, Progress

T = TypeVar("T")
_TOKENS = 50_000  # token ids are below this
_LONG = 100_000  # number of tokens in the long prompt
_MORE = 6  # number of blocks that a sequence may need beyond its prompt


def bench_blocks(
    *,
    num_sequences: int = 1000,
    blocks_per_sequence: int = 64,
    num_blocks: int = 100_000,
    block_size: int = 16,
    seed: int = 0,
    progress: Progress = UNWATCHED.progress,
) -> list[dict[str, Any]]:
    """Measure every operation on `num_sequences` sequences, then on enough sequences to fill `num_blocks`.

    Returns rows with the keys `operation`, `scale`, `us_median`, `us_p10`, `us_p90`, `samples` and `per`,
    which says whether times are per block, sequence or prompt.
    """
    rng = random.Random(seed)
    rows = _pool_rows(num_blocks, blocks_per_sequence)
    progress(1, 6)
    for i, count in enumerate((num_sequences, max(1, num_blocks // (blocks_per_sequence + _MORE)))):
        load = _Load(rng, count, blocks_per_sequence, block_size)
        load.time_prompts()
        progress(2 + 2 * i, 6)
        load.time_decoding()
        progress(3 + 2 * i, 6)
        rows += load.timed.rows()
    rows += _long_rows(rng, num_blocks, block_size)
    progress(6, 6)
    return rows


class _Timings:
    """Times of operations at one scale, in microseconds. Each time is the mean over a batch."""

    def __init__(self, scale: str) -> None:
        self._scale = scale
        self._us: dict[tuple[str, str], list[float]] = {}

    def call(
        self, operation: str, work: Callable[..., T], *given: Any, count: int = 1, per: str = "sequence"
    ) -> T:
        """Run `work(*given)`, and record its time divided by `count`, a number of operations or blocks."""
        start_ns = perf_counter_ns()
        found = work(*given)
        end_ns = perf_counter_ns()
        self._us.setdefault((operation, per), []).append((end_ns - start_ns) / 1000 / count)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return rows for `kvq bench` with the median and the 10th and 90th percentiles of each operation."""
        return [
            {
                "operation": operation,
                "scale": self._scale,
                "us_median": round(percentile(us, 50), 4),
                "us_p10": round(percentile(us, 10), 4),
                "us_p90": round(percentile(us, 90), 4),
                "samples": len(us),
                "per": per,
            }
            for (operation, per), us in self._us.items()
        ]


def _pool_rows(num_blocks: int, batch: int) -> list[dict[str, Any]]:
    pool = BlockPool(num_blocks)
    timed = _Timings(f"pool of {num_blocks:,} blocks, {batch} at a time")
    each = partial(timed.call, count=batch, per="block")
    for _ in range(3):
        taken = [each("pool_allocate", pool.allocate, batch) for _ in range(num_blocks // batch)]
        for blocks in taken:
            each("pool_free", pool.release_all, reversed(blocks))
    pool.check_integrity()
    return timed.rows()


class _Load:
    """Load of sequences with different prompts in one block manager."""

    def __init__(self, rng: random.Random, num_sequences: int, blocks_each: int, block_size: int) -> None:
        self._rng = rng
        self._each = blocks_each
        self._size = block_size
        self._count = num_sequences
        room = num_sequences * (blocks_each + _MORE)
        self._manager = BlockManager(num_blocks=[room], block_size=block_size)
        self.timed = _Timings(f"{num_sequences:,} sequences of {blocks_each} blocks in {room:,}")
        self._prompts: list[array[int]] = [
            array("I", rng.choices(range(_TOKENS), k=blocks_each * block_size)) for _ in range(num_sequences)
        ]

    def time_prompts(self) -> None:
        """Hash, look up, allocate, publish and free entire prompts, then repeat with hits and eviction."""
        manager, each, timed = self._manager, self._each, self.timed
        blocks = partial(timed.call, count=each, per="block")
        prompts = [manager.prompt(tokens) for tokens in self._prompts]
        sequences: list[Sequence] = []
        for prompt in prompts:
            blocks("hash", manager.blocks.index.digest_at, prompt, each - 1)
            match = timed.call("lookup_miss", manager.lookup, prompt)
            assert match.length == 0, "a fresh prompt can't hit"
            sequences.append(manager.start(prompt))
        for i, sequence in enumerate(sequences):
            work = [(sequence, each * self._size)]
            if i % 2:
                blocks("allocate", manager.extend, work)
            else:
                blocks("allocate_with_slots", manager.append, work)
        for sequence in sequences:
            blocks("publish", manager.commit, sequence, [1])
        manager.check_integrity()
        for sequence in sequences:
            blocks("free", manager.free, sequence)
        for tokens in self._prompts:
            again = manager.prompt(tokens)
            match = blocks("lookup", manager.lookup, again)
            assert match.length == each * self._size - 1, "a cached prompt must hit"
            manager.free(timed.call("start_hit", manager.start, again))
        manager.take_orders()
        self._time_evicting()

    def _time_evicting(self) -> None:
        """Time allocation of blocks that must first be evicted from the prefix index."""
        manager, each = self._manager, self._each
        filler = manager.new_sequence()
        manager.append([(filler, manager.usage()[0].free * self._size)])
        allocate = partial(manager.pools[0].allocate, each)
        taken = [
            self.timed.call("allocate_evicting", allocate, count=each, per="block")
            for _ in range(min(self._count, manager.usage()[0].cached // each))
        ]
        for blocks in taken:
            manager.pools[0].release_all(blocks)
        manager.free(filler)
        manager.check_integrity()

    def time_decoding(self) -> None:
        """Decode all sequences at once (append, commit), then fork sequences and append after the fork."""
        manager, timed = self._manager, self.timed
        sequences = [self._filled(manager.prompt(tokens)) for tokens in self._prompts]
        token = [7]

        def commit() -> None:
            for sequence in sequences:
                manager.commit(sequence, token)

        for _ in range(4 * self._size):  # each step adds blocks to some tables, and 16 steps to all tables
            work = [(sequence, 1) for sequence in sequences]
            timed.call("append", manager.append, work, count=len(work))
            timed.call("commit", commit, count=len(work))
        manager.check_integrity()
        for sequence in sequences[:200]:
            fork = timed.call("fork", manager.fork, sequence)
            timed.call("append_after_fork", manager.append, [(sequence, 1)])
            timed.call("free_fork", manager.free, fork)
        for sequence in sequences:
            manager.free(sequence)
        manager.check_integrity()
        manager.take_orders()
        manager.drop_cached()

    def _filled(self, prompt: PrefixQuery) -> Sequence:
        """Return a sequence whose prompt is computed except for a random number of tokens."""
        sequence = self._manager.start(prompt)
        count = len(prompt.tokens) - sequence.length - self._rng.randrange(self._size)
        self._manager.append([(sequence, max(1, count))])
        self._manager.commit(sequence)
        return sequence


def _lookup(manager: BlockManager, tokens: "array[int]") -> tuple[PrefixQuery, Match]:
    prompt = manager.prompt(tokens)
    return prompt, manager.lookup(prompt)


def _long_rows(rng: random.Random, num_blocks: int, block_size: int) -> list[dict[str, Any]]:
    """Return rows for one long prompt in a pool full of cached blocks."""
    manager = BlockManager(num_blocks=[num_blocks], block_size=block_size)
    tokens = array("I", rng.choices(range(_TOKENS), k=min(_LONG, (num_blocks - 1) * block_size)))
    _compute(manager, tokens)
    while manager.usage()[0].free > 4096:
        _compute(manager, rng.choices(range(_TOKENS), k=4096 * block_size))
    timed = _Timings(f"{len(tokens):,} tokens in {num_blocks:,} blocks")
    whole = partial(timed.call, per="prompt")
    for _ in range(20):
        prompt, match = whole("lookup_long", _lookup, manager, tokens)
        assert match.length >= len(tokens) - block_size, "a cached prompt must hit"
        whole("lookup_long_again", manager.lookup, prompt)
        sequence = whole("start_long", manager.start, prompt)
        whole("free_long", manager.free, sequence)
    manager.check_integrity()
    return timed.rows()


def _compute(manager: BlockManager, tokens: "array[int] | list[int]") -> None:
    """Add a prompt to the prefix index."""
    sequence = manager.start(manager.prompt(tokens))
    manager.append([(sequence, len(tokens))])
    manager.commit(sequence)
    manager.free(sequence)


_MEDIAN, _SIGMA, _LONGEST = 500, 1.0, 4096  # log-normal lengths: tokens, spread of the logarithm, tokens


def measure_utilization(
    *, block_size: int = 16, num_sequences: int = 200, rounds: int = 400, seed: int = 0
) -> dict[str, Any]:
    """Measure the ratio of stored tokens to allocated token slots while `num_sequences` sequences run.

    Each sequence grows to a random length and is then replaced. Half of the length is the prompt; the rest is
    decoded at 16 tokens per round. `contiguous_mean` is the ratio with one buffer of `longest` tokens per
    sequence.
    """
    rng = random.Random(seed)
    manager = BlockManager(num_blocks=[num_sequences * -(-_LONGEST // block_size)], block_size=block_size)
    running: dict[Sequence, int] = {}  # sequence -> final length
    paged, contiguous = [], []
    for at in range(rounds):
        while len(running) < num_sequences:
            length = min(_LONGEST, max(2, round(rng.lognormvariate(0, _SIGMA) * _MEDIAN)))
            sequence = manager.new_sequence()
            manager.extend([(sequence, max(1, length // 2))])
            manager.commit(sequence)
            running[sequence] = length
        if at >= rounds // 4:  # by then, lengths are mixed
            paged.append(manager.utilization())
            held = sum(sequence.length for sequence in running)
            contiguous.append(held / (_LONGEST * len(running)))
        for sequence, length in list(running.items()):
            if sequence.length >= length:
                manager.free(sequence)
                del running[sequence]
            else:
                manager.extend([(sequence, min(16, length - sequence.length))])
                manager.commit(sequence)
    manager.check_integrity()
    return {
        "block_size": block_size,
        "median_length": _MEDIAN,
        "sequences": num_sequences,
        "samples": len(paged),
        "paged_mean": round(fmean(paged), 4),
        "paged_p10": round(percentile(paged, 10), 4),
        "contiguous_mean": round(fmean(contiguous), 4),
        "longest": _LONGEST,
    }
