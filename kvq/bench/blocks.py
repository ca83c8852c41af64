"""`kvq bench blocks`: what block memory costs per block and per sequence, prefix index on."""

import random
from array import array
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from kvq.bench.timing import Samples
from kvq.blockmgr import BlockManager, BlockPool, PrefixQuery, Sequence

Progress = Callable[[int, int], None]
_TOKENS = 50_000  # ids are drawn below this
_LONG = 100_000  # tokens of the long prompt
_MORE = 6  # blocks that a sequence may add to its prompt's


def bench_blocks(
    *,
    num_sequences: int = 1000,
    blocks_per_sequence: int = 64,
    num_blocks: int = 100_000,
    block_size: int = 16,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Measure every operation on `num_sequences` sequences, then on as many as fill `num_blocks`.

    Returns rows with the keys `operation`, `scale`, `us_median`, `us_p10`, `us_p90`, `per` (what the
    time is for: a block, a sequence or a prompt) and `samples`.
    """
    rng = random.Random(seed)
    rows = _pool_rows(num_blocks, blocks_per_sequence)
    progress(1, 6)
    filling = max(1, num_blocks // (blocks_per_sequence + _MORE))
    for i, count in enumerate((num_sequences, filling)):
        load = _Load(rng, count, blocks_per_sequence, block_size)
        rows += load.prompt_rows()
        progress(2 + 2 * i, 6)
        rows += load.decode_rows()
        progress(3 + 2 * i, 6)
    rows += _long_rows(rng, num_blocks, block_size)
    progress(6, 6)
    return rows


def _pool_rows(num_blocks: int, batch: int) -> list[dict[str, Any]]:
    """The bare pool: blocks that were free, and blocks that had to be evicted from the cache."""
    pool = BlockPool(num_blocks)
    free, allocate = Samples(), Samples()
    for _ in range(3):
        taken = []
        for _ in range(num_blocks // batch):
            start = perf_counter_ns()
            blocks = pool.allocate(batch)
            allocate.add(start, batch)
            taken.append(blocks)
        for blocks in taken:
            start = perf_counter_ns()
            pool.release_all(reversed(blocks))
            free.add(start, batch)
    pool.check_integrity()
    scale = f"pool of {num_blocks:,} blocks, {batch} at a time"
    return [
        allocate.row("pool_allocate", scale) | {"per": "block"},
        free.row("pool_free", scale) | {"per": "block"},
    ]


class _Load:
    """Sequences with prompts of their own over one manager."""

    def __init__(self, rng: random.Random, num_sequences: int, blocks_each: int, block_size: int) -> None:
        self._rng = rng
        self._each = blocks_each
        self._size = block_size
        self._count = num_sequences
        room = num_sequences * (blocks_each + _MORE)
        self._manager = BlockManager(num_blocks=[room], block_size=block_size)
        self._scale = f"{num_sequences:,} sequences of {blocks_each} blocks in {room:,}"
        self._prompts: list[array[int]] = [
            array("I", rng.choices(range(_TOKENS), k=blocks_each * block_size)) for _ in range(num_sequences)
        ]

    def prompt_rows(self) -> list[dict[str, Any]]:
        """Hash, look up, allocate, publish and free whole prompts; then again as hits."""
        hashed, missed, allocated, committed = Samples(), Samples(), Samples(), Samples()
        slotted, freed, found, shared = Samples(), Samples(), Samples(), Samples()
        manager, each = self._manager, self._each
        prompts = [manager.prompt(tokens) for tokens in self._prompts]
        sequences: list[Sequence] = []
        for prompt in prompts:
            start = perf_counter_ns()
            manager.blocks.index.digest_at(prompt, each - 1)
            hashed.add(start, each)
            start = perf_counter_ns()
            match = manager.lookup(prompt)
            missed.add(start, 1)
            assert match.length == 0, "a fresh prompt can't hit"
            sequences.append(manager.start(prompt))
        for i, sequence in enumerate(sequences):
            work = [(sequence, each * self._size)]
            start = perf_counter_ns()
            if i % 2:
                manager.extend(work)
                allocated.add(start, each)
            else:
                manager.append(work)
                slotted.add(start, each)
        for sequence in sequences:
            start = perf_counter_ns()
            manager.commit(sequence, [1])
            committed.add(start, each)
        manager.check_integrity()
        for sequence in sequences:
            start = perf_counter_ns()
            manager.free(sequence)
            freed.add(start, each)
        for tokens in self._prompts:
            again = manager.prompt(tokens)
            start = perf_counter_ns()
            match = manager.lookup(again)
            found.add(start, each)
            assert match.length == each * self._size - 1, "a cached prompt must hit"
            start = perf_counter_ns()
            sequence = manager.start(again)
            shared.add(start, 1)
            manager.free(sequence)
        manager.take_orders()
        rows = [
            hashed.row("hash", self._scale) | {"per": "block"},
            missed.row("lookup_miss", self._scale) | {"per": "sequence"},
            allocated.row("allocate", self._scale) | {"per": "block"},
            slotted.row("allocate_with_slots", self._scale) | {"per": "block"},
            committed.row("publish", self._scale) | {"per": "block"},
            freed.row("free", self._scale) | {"per": "block"},
            found.row("lookup", self._scale) | {"per": "block"},
            shared.row("start_hit", self._scale) | {"per": "sequence"},
        ]
        return rows + self._evicting_row()

    def _evicting_row(self) -> list[dict[str, Any]]:
        """Allocate when every block taken has to leave the prefix index first."""
        manager, each = self._manager, self._each
        filler = manager.new_sequence()
        manager.append([(filler, manager.usage()[0].free * self._size)])
        samples = Samples()
        taken = []
        for _ in range(min(self._count, manager.usage()[0].cached // each)):
            start = perf_counter_ns()
            blocks = manager.pools[0].allocate(each)
            samples.add(start, each)
            taken.append(blocks)
        for blocks in taken:
            manager.pools[0].release_all(blocks)
        manager.free(filler)
        manager.check_integrity()
        return [samples.row("allocate_evicting", self._scale) | {"per": "block"}]

    def decode_rows(self) -> list[dict[str, Any]]:
        """Decode steps of all sequences at once: append, commit; then fork and write apart."""
        manager = self._manager
        sequences = [self._filled(manager.prompt(tokens)) for tokens in self._prompts]
        append, commit, fork, free, write = Samples(), Samples(), Samples(), Samples(), Samples()
        token = [7]
        for _ in range(4 * self._size):  # every step some tables get a block, over 16 steps all do
            work = [(sequence, 1) for sequence in sequences]
            start = perf_counter_ns()
            manager.append(work)
            append.add(start, len(work))
            start = perf_counter_ns()
            for sequence in sequences:
                manager.commit(sequence, token)
            commit.add(start, len(work))
        manager.check_integrity()
        for sequence in sequences[:200]:
            start = perf_counter_ns()
            twin = manager.fork(sequence)
            fork.add(start, 1)
            start = perf_counter_ns()
            manager.append([(sequence, 1)])
            write.add(start, 1)
            start = perf_counter_ns()
            manager.free(twin)
            free.add(start, 1)
        for sequence in sequences:
            manager.free(sequence)
        manager.check_integrity()
        manager.take_orders()
        manager.drop_cached()
        return [
            append.row("append", self._scale) | {"per": "sequence"},
            commit.row("commit", self._scale) | {"per": "sequence"},
            fork.row("fork", self._scale) | {"per": "sequence"},
            write.row("append_after_fork", self._scale) | {"per": "sequence"},
            free.row("free_fork", self._scale) | {"per": "sequence"},
        ]

    def _filled(self, prompt: PrefixQuery) -> Sequence:
        """A sequence whose prompt, a random number of tokens shorter, is computed."""
        sequence = self._manager.start(prompt)
        count = len(prompt.tokens) - sequence.length - self._rng.randrange(self._size)
        self._manager.append([(sequence, max(1, count))])
        self._manager.commit(sequence)
        return sequence


def _long_rows(rng: random.Random, num_blocks: int, block_size: int) -> list[dict[str, Any]]:
    """One long prompt in a pool full of cached blocks."""
    manager = BlockManager(num_blocks=[num_blocks], block_size=block_size)
    tokens = array("I", rng.choices(range(_TOKENS), k=min(_LONG, (num_blocks - 1) * block_size)))
    first = manager.start(manager.prompt(tokens))
    manager.append([(first, len(tokens))])
    manager.commit(first)
    manager.free(first)
    while manager.usage()[0].free > 4096:
        other = manager.start(manager.prompt(rng.choices(range(_TOKENS), k=4096 * block_size)))
        manager.append([(other, 4096 * block_size)])
        manager.commit(other)
        manager.free(other)
    cold, warm, started, ended = Samples(), Samples(), Samples(), Samples()
    for _ in range(20):
        start = perf_counter_ns()
        prompt = manager.prompt(tokens)
        match = manager.lookup(prompt)
        cold.add(start, 1)
        assert match.length >= len(tokens) - block_size, "a cached prompt must hit"
        start = perf_counter_ns()
        manager.lookup(prompt)
        warm.add(start, 1)
        start = perf_counter_ns()
        sequence = manager.start(prompt)
        started.add(start, 1)
        start = perf_counter_ns()
        manager.free(sequence)
        ended.add(start, 1)
    manager.check_integrity()
    scale = f"{len(tokens):,} tokens in {num_blocks:,} blocks"
    return [
        cold.row("lookup_long", scale) | {"per": "prompt"},
        warm.row("lookup_long_again", scale) | {"per": "prompt"},
        started.row("start_long", scale) | {"per": "prompt"},
        ended.row("free_long", scale) | {"per": "prompt"},
    ]
