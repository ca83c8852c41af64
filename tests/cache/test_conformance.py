"""Every backend passes the conformance suite, and the suite notices every kind of fault."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.blockmgr.events import Fill, Order, Scrub
from kvq.cache import KVCache
from kvq.cache.conformance import CHECKS, check_backend
from kvq.cache.dense_backend import DenseCache
from kvq.errors import KVQError, UnsupportedKernel
from kvq.layout import BlockOrder

KINDS = ["fp32", "bf16", "fp8", "int8", "int8_per_head_rot", "int4", "int2", "k8v4", "fp8_per_head/bf16"]


@pytest.mark.daily(6)
@pytest.mark.parametrize("order", list(BlockOrder))
@pytest.mark.parametrize("kv", KINDS)
def test_kvq_conforms_in_every_kind_of_format_and_both_orders(kv: str, order: BlockOrder) -> None:
    check_backend(partial(KVCache, backend="reference"), kv=kv, order=order, tolerance=1e-5)


@pytest.mark.parametrize("kv", ["fp32", "bf16", "fp16"])
def test_dense_conforms(kv: str) -> None:
    check_backend(DenseCache, kv=kv, tolerance=1e-5)


class Broken:
    """A layer's store with one method replaced."""

    def __init__(self, store: Any, **methods: Any) -> None:
        self._store = store
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class BrokenStores(KVCache):
    """The stores of its layers attend, or write, as this class does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stores = {
            layer: Broken(store, attend=partial(self.attended, store), write=partial(self.written, store))
            for layer, store in self.stores.items()
        }

    def attended(self, store: Any, q: Tensor, batch: Any, options: Any) -> tuple[Tensor, Tensor]:
        return store.attend(q, batch, options)

    def written(self, store: Any, *rows: Any) -> Tensor:
        return store.write(*rows)


class OldStrides(KVCache):
    """Reads through the views it had before it grew."""

    def grow(self, num_blocks: list[int]) -> None:
        old = self.stores
        super().grow(num_blocks)
        self.stores = old
        for store in old.values():
            store.blocks.k.codes.zero_()


class NewBlocksDirty(KVCache):
    """Grows without zeroing."""

    def grow(self, num_blocks: list[int]) -> None:
        before = self.num_blocks
        super().grow(num_blocks)
        self.write_block(0, before[0], self.read_block(0, before[0]) + 1)


class Shrinks(KVCache):
    """Accepts fewer blocks in silence."""

    def grow(self, num_blocks: list[int]) -> None:
        if num_blocks >= self.num_blocks:
            super().grow(num_blocks)


class OffByOneWindow(BrokenStores):
    """Sees one token less than the window allows."""

    def attended(self, store: Any, q: Tensor, batch: Any, options: Any) -> tuple[Tensor, Tensor]:
        if options.window is not None:
            options = replace(options, window=options.window - 1)
        return store.attend(q, batch, options)


class SinksAreLost(BrokenStores):
    """Takes sinks and does nothing with them."""

    def attended(self, store: Any, q: Tensor, batch: Any, options: Any) -> tuple[Tensor, Tensor]:
        return store.attend(q, batch, options.without_sinks())


class ScaledWrong(BrokenStores):
    """Off by one percent."""

    def attended(self, store: Any, q: Tensor, batch: Any, options: Any) -> tuple[Tensor, Tensor]:
        out, lse = store.attend(q, batch, options)
        return out * 1.01, lse


class NoFlags(BrokenStores):
    """Says that every row is finite."""

    def written(self, store: Any, *rows: Any) -> Tensor:
        return torch.zeros_like(store.write(*rows))


class UnorderedCopies(KVCache):
    """Copies all pairs at once: a chain takes what its middle held before."""

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        contents = [self.read_block(group, source) for source, _ in pairs]
        for (_, target), content in zip(pairs, contents, strict=True):
            self.write_block(group, target, content)


class ScrubsFirst(KVCache):
    """Carries scrubs out before everything else."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(sorted(orders, key=lambda order: not isinstance(order, Scrub)))


class FillsLast(KVCache):
    """Carries fills out after everything else."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(sorted(orders, key=lambda order: isinstance(order, Fill)))


class FillsOnlyOnce(KVCache):
    """Leaves a block as it was filled first."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        fills = {(order.group, order.block): order for order in orders[::-1] if isinstance(order, Fill)}
        super().carry_out([x for x in orders if not isinstance(x, Fill) or fills[x.group, x.block] is x])


class ScrubsCodesOnly(KVCache):
    """Leaves the last bytes of a block, where the scales lie."""

    def scrub(self, group: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            content = self.read_block(group, block)
            content[:-64] = 0
            self.write_block(group, block, content)


class ReportsLess(KVCache):
    """Leaves padding out of its bytes."""

    @property
    def nbytes(self) -> int:
        return super().nbytes - 16


class SharesABlock(KVCache):
    """Two ids, one block."""

    def write_block(self, group: int, block: int, content: Tensor) -> None:
        super().write_block(group, max(block, 1), content)

    def read_block(self, group: int, block: int) -> Tensor:
        return super().read_block(group, max(block, 1))


class ReadsStaleEntries(BrokenStores):
    """Adds a little of a table's first block, as 0 x NaN would."""

    def attended(self, store: Any, q: Tensor, batch: Any, options: Any) -> tuple[Tensor, Tensor]:
        out, lse = store.attend(q, batch, options)
        first = store.blocks.v.codes[batch.tables[0, 0].long()].float()
        return out + 0 * first.sum(), lse


class ReadsUnwrittenSlots(BrokenStores):
    """Adds 0 x everything in the last sequence's last block, whose end is not written yet."""

    def attended(self, store: Any, q: Tensor, batch: Any, options: Any) -> tuple[Tensor, Tensor]:
        out, lse = store.attend(q, batch, options)
        last = batch.tables[-1][(batch.context_lens[-1] - 1) // 5].long()
        return out + 0 * store.blocks.v.codes[last].float().sum(), lse


FAULTS: list[tuple[type[KVCache], str]] = [
    (OldStrides, "grows"),
    (NewBlocksDirty, "grows"),
    (Shrinks, "grows"),
    (OffByOneWindow, "writes and attends"),
    (SinksAreLost, "writes and attends"),
    (ScaledWrong, "writes and attends"),
    (NoFlags, "flags rows that are not finite"),
    (UnorderedCopies, "carries out orders one by one"),
    (ScrubsFirst, "carries out orders one by one"),
    (FillsLast, "carries out orders one by one"),
    (FillsOnlyOnce, "carries out orders one by one"),
    (ScrubsCodesOnly, "scrubs"),
    (ReportsLess, "blocks do not overlap"),
    (SharesABlock, "blocks do not overlap"),
    (ReadsStaleEntries, "forgets what left the window"),
    (ReadsUnwrittenSlots, "ignores what free blocks hold"),
]


@pytest.mark.parametrize(("broken", "check"), FAULTS)
def test_every_kind_of_fault_is_named(broken: type[KVCache], check: str) -> None:
    with pytest.raises(KVQError, match=rf"of {len(CHECKS)} checks fail with fp32, layer-major: .*{check}: "):
        check_backend(partial(broken, backend="reference"))


def test_a_backend_may_refuse_softcap_and_sinks_with_a_reason() -> None:
    class Plain(ByLayer):
        def attend(self, layer: int, q: Tensor, batch: Any, options: Any) -> tuple[Tensor, Tensor]:
            if options.softcap is not None or options.sinks is not None:
                raise UnsupportedKernel("this backend knows neither softcap nor sinks")
            return super().attend(layer, q, batch, options)

    class Nothing(ByLayer):
        def attend(self, *args: Any) -> tuple[Tensor, Tensor]:
            raise UnsupportedKernel("not today")

    check_backend(Plain)
    with pytest.raises(KVQError, match="plain attention is refused: not today"):
        check_backend(Nothing)


class ByLayer:
    """A backend without stores, which writes and attends by layer itself."""

    def __init__(self, layout: Any, **options: Any) -> None:
        self._dense = DenseCache(layout, **options)
        self.group_of = {x.index: group.group.index for group in layout.groups for x in group.group.layers}

    def __getattr__(self, name: str) -> Any:
        if name == "stores":
            raise AttributeError(name)
        return getattr(self._dense, name)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        return self._dense.stores[layer].write(k, v, slots)

    def attend(self, layer: int, q: Tensor, batch: Any, options: Any) -> tuple[Tensor, Tensor]:
        return self._dense.stores[layer].attend(q, batch, options)


def test_a_backend_without_stores_conforms() -> None:
    check_backend(ByLayer)
