"""Orders of a real block manager, carried out: every sequence keeps its own K and V through all of it."""

import random
from functools import cache

import pytest
import torch

from kvq.blockmgr import BlockManager, Copy, Demote, Fill, Scrub, Sequence
from kvq.blockmgr.pool import BlockId
from kvq.cache import KVCache
from kvq.errors import OutOfBlocks
from kvq.formats import KVRecipe
from kvq.kernels.gather_dense.reference import gather_dense
from kvq.layout import BlockOrder, plan_layout
from kvq.tiers.tiers import OWN_FORM, BlockKey, Tiers
from tests.kernels.kit import CPU, POISON, geometry, stored

DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 7, None]
SIZE = 3


def cache_with_tiers(kv: str, order: BlockOrder, *, num_blocks: int = 20) -> KVCache:
    """A poisoned cache with host memory for 12 blocks of each layer group."""
    model = geometry(DIMS, windows=WINDOWS)
    recipe = KVRecipe.uniform(kv, DIMS)
    cache = KVCache(
        plan_layout(model, recipe, block_size=SIZE, order=order),
        num_blocks=[num_blocks] * 2,
        device=CPU,
        backend="reference",
    )
    cache.tiers = Tiers(12 * sum(group.block_bytes for group in cache.layout.groups), None)
    for group in (0, 1):
        cache.pool(group).fill_(POISON)
    return cache


class Run:
    """Sequences over one cache. K and V of a token are made from its id and its position."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.manager = BlockManager(num_blocks=cache.num_blocks, block_size=SIZE, windows=[None, 7])
        self.manager.blocks.tiers = cache.tiers
        self.random = random.Random(seed)
        self.live: list[Sequence] = []
        self.back = self.lost = 0  # prefixes that came back from host memory, and that did not

    def rows(self, layer: int, part: int, tokens: list[int], start: int) -> torch.Tensor:
        """fp32 [tokens, kv_heads, dim] of tokens from position `start` on."""
        return torch.stack([_row(layer, part, token, start + i) for i, token in enumerate(tokens)])

    def carry_out(self) -> None:
        self.cache.carry_out(self.manager.take_orders())

    def extend(self, sequence: Sequence, tokens: list[int]) -> None:
        """Append tokens, carry orders out, write their rows, commit."""
        start = sequence.length
        slots = self.manager.append([(sequence, len(tokens))])
        self.carry_out()
        for layer in range(3):
            own = torch.tensor(slots[self.cache.group_of[layer]])
            self.cache.write(layer, *(self.rows(layer, part, tokens, start) for part in (0, 1)), own)
        known = len(sequence.tokens)
        self.manager.commit(sequence, tokens[max(0, known - start) :])

    def check(self) -> None:
        """Every position that a later token can see holds its token's rows."""
        self.manager.check_integrity()
        for sequence in self.live:
            for layer in range(3):
                group = self.cache.group_of[layer]
                start = sequence.starts[group] * SIZE
                table = torch.tensor(sequence.tables[group], dtype=torch.int32)
                got = [
                    x[0] for x in gather_dense(self.cache.layer(layer), table[None], start, sequence.length)
                ]
                if start == sequence.length:
                    continue
                for part, rows in enumerate(got):
                    written = self.rows(layer, part, sequence.tokens[start : sequence.length].tolist(), start)
                    expected = stored(self.cache, layer, "kv"[part], written)
                    assert torch.equal(rows, expected.transpose(0, 1)), layer


@cache
def _row(layer: int, part: int, token: int, position: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(token * 1000 + position * 10 + layer * 2 + part)
    return torch.randn(3, DIMS[layer][part], generator=draw)


def start(run: Run) -> None:
    tokens = [run.random.randrange(3) for _ in range(run.random.randrange(1, 12))]
    sequence = run.manager.start(run.manager.prompt(tokens))
    run.live.append(sequence)
    run.extend(sequence, tokens[sequence.length :])


def decode(run: Run) -> None:
    sequence = run.random.choice(run.live)
    more = [run.random.randrange(3) for _ in range(run.random.randrange(1, 4))]
    run.extend(sequence, [*sequence.tokens[sequence.length :], *more])


def fork(run: Run) -> None:
    run.live.append(run.manager.fork(run.random.choice(run.live)))


def end(run: Run) -> None:
    sequence = run.live.pop(run.random.randrange(len(run.live)))
    if run.random.random() < 0.3:
        run.manager.scrub(sequence)
    run.manager.free(sequence)


def preempt(run: Run) -> None:
    """Lose a sequence's blocks, which move to host memory, and start again with what comes back."""
    manager, tiers = run.manager, run.cache.tiers
    assert tiers is not None
    sequence = run.live.pop(run.random.randrange(len(run.live)))
    prompt = manager.prompt(sequence.tokens)
    manager.free(sequence)
    manager.below.give_up(prompt, to_tiers=True)
    run.carry_out()
    if run.random.random() < 0.3:
        for held in tiers._host.values():
            held.digest = b"another digest."
    length = manager.below.restorable(prompt)
    if length > manager.lookup(prompt).length:
        restore = manager.below.restore(prompt, length)
        fetch = tiers.fetch([key for _, key in restore.missing])
        found = [fetch.take(i) for i in range(len(restore.missing))]
        for i, content in enumerate(found):
            if content is not None:
                manager.below.fill(restore, i, *content)
        manager.below.end(restore, is_complete=None not in found)
        run.carry_out()
        if None in found:
            run.lost += 1
        else:
            manager.free(restore.sequence)
            run.back += 1
    sequence = manager.start(prompt)
    run.live.append(sequence)
    run.extend(sequence, sequence.tokens[sequence.length :].tolist())


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("kv", "seed", "order"),
    [
        ("int4", 2, BlockOrder.LAYER_MAJOR),
        ("k8v4", 3, BlockOrder.BLOCK_MAJOR),
        pytest.param("fp32", 1, BlockOrder.LAYER_MAJOR, marks=pytest.mark.long),
        pytest.param("fp32", 1, BlockOrder.BLOCK_MAJOR, marks=pytest.mark.long),
        pytest.param("int4", 2, BlockOrder.BLOCK_MAJOR, marks=pytest.mark.long),
        pytest.param("k8v4", 3, BlockOrder.LAYER_MAJOR, marks=pytest.mark.long),
    ],
)
def test_sequences_keep_their_rows_through_random_operations(kv: str, seed: int, order: BlockOrder) -> None:
    run = Run(cache_with_tiers(kv, order), seed)
    refused = 0
    for _ in range(150):
        operation = run.random.choice([start, decode, decode, fork, preempt, preempt, end])
        if not run.live:
            operation = start
        try:
            operation(run)
        except OutOfBlocks:
            refused += 1
            for sequence in run.live:  # a start that was refused after its hit was shared
                if sequence.length == 0:
                    run.manager.free(sequence)
            run.live = [x for x in run.live if x in run.manager.sequences()]
            run.carry_out()  # what it shared may include a copy of a part
        if run.random.random() < 0.1:  # orders may also be taken between two operations
            run.carry_out()
        run.check()
    assert min(run.back, run.lost) > 0, "the run loaded too little to show anything"


def test_orders_of_one_block_are_carried_out_in_their_order() -> None:
    cache = cache_with_tiers("int4", BlockOrder.LAYER_MAJOR)
    assert cache.tiers is not None
    contents = [torch.full_like(cache.read_block(0, 0), 10 + i) for i in range(4)]
    for i, content in enumerate(contents):
        cache.write_block(0, i, content)
    a, b, c, d = map(BlockId, range(4))
    key = BlockKey(b"root", b"digest", 0)
    cache.carry_out(
        [
            Copy(group=0, source=a, target=b),
            Demote(group=0, source=b, key=key, form=OWN_FORM),  # what b got a moment ago
            Copy(group=0, source=c, target=b),
            Fill(group=0, block=c, content=contents[3].numpy(), rung=0),
            Scrub(group=0, block=a),
            Copy(group=0, source=a, target=d),  # zeros by now
        ]
    )
    held = cache.tiers.in_host(key)
    assert held is not None
    assert bytes(held.content) == contents[0].numpy().tobytes()
    assert torch.equal(cache.read_block(0, 1), contents[2])
    assert torch.equal(cache.read_block(0, 2), contents[3])
    assert not cache.read_block(0, 3).any()


def test_no_orders_touch_nothing() -> None:
    cache = cache_with_tiers("int4", BlockOrder.BLOCK_MAJOR)
    cache.carry_out([])
    assert (cache.pool(0) == POISON).all()
