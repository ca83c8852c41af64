"""Orders of a real block manager, carried out: every sequence keeps its own K and V through all of it."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from kvq.blockmgr import BlockManager, Copy, HostSlot, Scrub, Sequence, SwapIn, SwapOut
from kvq.blockmgr.pool import BlockId
from kvq.cache import KVCache
from kvq.errors import ConfigError, OutOfBlocks
from kvq.formats import KVRecipe
from kvq.kernels.gather_dense.reference import gather_dense
from kvq.layout import BlockOrder, plan_layout
from tests.kernels.kit import CPU, POISON, geometry, stored

DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 7, None]
SIZE = 3


def swapping_cache(
    kv: str, order: BlockOrder, folder: Path | None, *, num_blocks: int = 20, host_slots: int = 12
) -> KVCache:
    """A poisoned cache with host slots."""
    model = geometry(DIMS, windows=WINDOWS)
    recipe = KVRecipe.uniform(kv, DIMS)
    cache = KVCache(
        plan_layout(model, recipe, block_size=SIZE, order=order),
        num_blocks=[num_blocks] * 2,
        device=CPU,
        backend="reference",
        host_slots=[host_slots] * 2,
        swap_folder=folder,
    )
    for group in (0, 1):
        cache.pool(group).fill_(POISON)
    return cache


class Run:
    """Sequences over one cache. K and V of a token are made from its id and its position."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.manager = BlockManager(
            num_blocks=cache.num_blocks, block_size=SIZE, windows=[None, 7], host_slots=[12, 12]
        )
        self.random = random.Random(seed)
        self.live: list[Sequence] = []
        self.back = self.lost = 0  # blocks that came back from a host slot, and that did not

    def rows(self, layer: int, part: int, tokens: list[int], start: int) -> torch.Tensor:
        """fp32 [tokens, kv_heads, dim] of tokens from position `start` on."""
        return torch.stack([_row(layer, part, token, start + i) for i, token in enumerate(tokens)])

    def carry_out(self) -> list[SwapIn]:
        return self.cache.carry_out(self.manager.take_orders())

    def extend(self, sequence: Sequence, tokens: list[int]) -> None:
        """Append tokens, carry orders out, write their rows, commit."""
        start = sequence.length
        slots = self.manager.append([(sequence, len(tokens))])
        assert self.carry_out() == []
        for layer in range(3):
            own = torch.tensor(slots[self.cache.group_of[layer]])
            self.cache.write(layer, *(self.rows(layer, part, tokens, start) for part in (0, 1)), own)
        known = len(sequence.tokens)
        self.manager.commit(sequence, tokens[max(0, known - start) :])

    def check(self) -> None:
        """Every position that a later token can see holds its token's rows."""
        self.manager.check_integrity()
        for sequence in self.live:
            if sequence.is_swapped:
                continue
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
    if not sequence.is_swapped:
        more = [run.random.randrange(3) for _ in range(run.random.randrange(1, 4))]
        run.extend(sequence, [*sequence.tokens[sequence.length :], *more])


def fork(run: Run) -> None:
    sequence = run.random.choice(run.live)
    if not sequence.is_swapped:
        run.live.append(run.manager.fork(sequence))


def end(run: Run) -> None:
    sequence = run.live.pop(run.random.randrange(len(run.live)))
    if not sequence.is_swapped and run.random.random() < 0.3:
        run.manager.scrub(sequence)
    run.manager.free(sequence)


def swap(run: Run) -> None:
    sequence = run.random.choice(run.live)
    if not sequence.is_swapped:
        run.manager.swap_out(sequence)
        return
    run.carry_out()
    if run.random.random() < 0.3:
        assert run.cache._host is not None
        for key in list(run.cache._host._stored):
            run.cache._host._stored[key] = b"another digest."
    run.manager.swap_in(sequence)
    orders = run.manager.take_orders()
    failed = run.cache.carry_out(orders)
    run.manager.recover(sequence, failed)
    run.lost += len(failed)
    run.back += sum(isinstance(order, SwapIn) for order in orders) - len(failed)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("kv", "seed", "to_file", "order"),
    [
        ("int4", 2, False, BlockOrder.LAYER_MAJOR),
        ("k8v4", 3, True, BlockOrder.BLOCK_MAJOR),
        pytest.param("fp32", 1, True, BlockOrder.LAYER_MAJOR, marks=pytest.mark.long),
        pytest.param("fp32", 1, True, BlockOrder.BLOCK_MAJOR, marks=pytest.mark.long),
        pytest.param("int4", 2, False, BlockOrder.BLOCK_MAJOR, marks=pytest.mark.long),
        pytest.param("k8v4", 3, True, BlockOrder.LAYER_MAJOR, marks=pytest.mark.long),
    ],
)
def test_sequences_keep_their_rows_through_random_operations(
    kv: str, seed: int, to_file: bool, order: BlockOrder, tmp_path: Path
) -> None:
    run = Run(swapping_cache(kv, order, tmp_path if to_file else None), seed)
    refused = 0
    for _ in range(150):
        operation = run.random.choice([start, decode, decode, fork, swap, swap, end])
        if not run.live:
            operation = start
        try:
            operation(run)
        except OutOfBlocks:
            refused += 1
            for sequence in run.live:  # a start that was refused after its hit was shared
                if not sequence.is_swapped and sequence.length == 0:
                    run.manager.free(sequence)
            run.live = [x for x in run.live if x in run.manager.sequences()]
            run.carry_out()  # what it shared may include a copy of a part
        if run.random.random() < 0.1:  # orders may also be taken between two operations
            run.carry_out()
        run.check()
    assert min(run.back, run.lost) > 0, "the run swapped too little to show anything"
    run.cache.close()
    assert list(tmp_path.iterdir()) == []


def test_orders_of_one_block_are_carried_out_in_their_order() -> None:
    cache = swapping_cache("int4", BlockOrder.LAYER_MAJOR, None)
    contents = [torch.full_like(cache.read_block(0, 0), 10 + i) for i in range(4)]
    for i, content in enumerate(contents):
        cache.write_block(0, i, content)
    a, b, c = BlockId(0), BlockId(1), BlockId(2)
    failed = cache.carry_out(
        [
            Copy(group=0, source=a, target=b),
            SwapOut(group=0, block=b, slot=HostSlot(0)),  # what b got a moment ago
            Copy(group=0, source=c, target=b),
            SwapIn(group=0, slot=HostSlot(0), block=c),
            Scrub(group=0, block=a),
            Copy(group=0, source=a, target=BlockId(3)),  # zeros by now
        ]
    )
    assert failed == []
    assert torch.equal(cache.read_block(0, 1), contents[2])
    assert torch.equal(cache.read_block(0, 2), contents[0])
    assert not cache.read_block(0, 3).any()


@pytest.mark.parametrize("order", list(BlockOrder))
def test_a_failed_swap_in_zeroes_its_block_and_the_others_go_on(
    order: BlockOrder, caplog: pytest.LogCaptureFixture
) -> None:
    cache = swapping_cache("int8", order, None)
    first, second = (torch.full_like(cache.read_block(1, 0), i) for i in (1, 2))
    cache.write_block(1, 0, first)
    cache.write_block(1, 1, second)
    cache.carry_out([SwapOut(group=1, block=BlockId(i), slot=HostSlot(i)) for i in (0, 1)])
    assert cache._host is not None
    cache._host._storage.read(cache._host._offset(1, 0), 1)[0] ^= 1
    back = [SwapIn(group=1, slot=HostSlot(i), block=BlockId(5 + i)) for i in (0, 1)]
    assert cache.carry_out(back) == [back[0]]
    assert not cache.read_block(1, 5).any()
    assert torch.equal(cache.read_block(1, 6), second)
    for block in (4, 7):
        assert (cache.read_block(1, block) == POISON).all()
    assert "group 1, slot 0; a miss" in caplog.text


def test_no_orders_touch_nothing() -> None:
    cache = swapping_cache("int4", BlockOrder.BLOCK_MAJOR, None)
    assert cache.carry_out([]) == []
    assert (cache.pool(0) == POISON).all()


def test_swapping_without_a_host_store_is_refused_with_the_remedy() -> None:
    model = geometry(DIMS, windows=WINDOWS)
    recipe = KVRecipe.uniform("int4", DIMS)
    cache = KVCache(plan_layout(model, recipe), num_blocks=[2, 2], device=CPU)
    assert cache.host_bytes == 0
    for order in (
        SwapOut(group=0, block=BlockId(0), slot=HostSlot(0)),
        SwapIn(group=0, block=BlockId(0), slot=HostSlot(0)),
    ):
        with pytest.raises(
            ConfigError, match="the cache has no host store; give KVCache the block manager's"
        ):
            cache.carry_out([order])
    cache.close()


def test_host_bytes_are_those_of_all_slots() -> None:
    cache = swapping_cache("int4", BlockOrder.LAYER_MAJOR, None, host_slots=7)
    assert cache.host_bytes == 7 * sum(group.block_bytes for group in cache.layout.groups)
