"""Workload of attention benchmarks: its shape, random rows in shuffled blocks, and dense copies."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.bench.kernels.measure import copies_for
from kvq.cache import KVCache
from kvq.errors import ConfigError
from kvq.formats import HeadMaxima, KVRecipe, StaticScales
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.kernels import SequenceBatch
from kvq.layout import BlockOrder, KVLayout, plan_layout
from kvq.sizes import parse_tokens

_CHUNK = 8192  # tokens written at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Workload of an attention benchmark: the shape of a step in one layer."""

    contexts: tuple[int, ...]  # number of tokens of every sequence, including new tokens
    new: int  # number of new tokens per sequence
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of Q, and of unquantized K and V
    device: torch.device
    backend: str = "auto"  # of kvq's kernels
    order: BlockOrder = BlockOrder.LAYER_MAJOR
    seed: int = 0
    latent_dim: int | None = None  # elements of a latent; `head_dim` is then the rotary part of the KV head
    expanded: int | None = None  # elements of a head's V, and of its K without the rotary part

    @property
    def dims(self) -> tuple[int, int]:
        """Numbers of elements of a token's K and V in one head."""
        return self.head_dim, self.head_dim if self.latent_dim is None else self.latent_dim

    @property
    def query_dim(self) -> int:
        """Number of elements of a query, including both parts in latent attention."""
        return self.head_dim + (self.latent_dim or 0)

    @property
    def is_even(self) -> bool:
        """True if all sequences have the same length."""
        return len(set(self.contexts)) == 1

    @property
    def tokens(self) -> int:
        """Total number of tokens of all sequences."""
        return sum(self.contexts)

    def queries(self) -> Tensor:
        """Return Q of the new tokens, [sequences, new, q_heads, query_dim]."""
        source = torch.Generator().manual_seed(self.seed + 1)
        shape = (len(self.contexts), self.new, self.q_heads, self.query_dim)
        return torch.randn(shape, generator=source, dtype=torch.float32).to(self.device, self.dtype)

    def dense_kv(self) -> tuple[Tensor, Tensor]:
        """Return K and V for sequences of equal length, fp32 [sequences, kv_heads, tokens, head_dim]."""
        shape = (len(self.contexts), self.kv_heads, self.contexts[0], self.head_dim)
        source = torch.Generator(device=self.device).manual_seed(self.seed)
        k, v = (
            torch.randn(shape, generator=source, device=self.device, dtype=torch.float32) for _ in range(2)
        )
        return k, v

    def blocks(self) -> list[int]:
        """Return the number of blocks of every sequence."""
        return [-(-n // self.block_size) for n in self.contexts]

    def shuffled_tables(self) -> Tensor:
        """Return the block table of every sequence, int32 [sequences, max blocks]."""
        needs = self.blocks()
        order = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(self.seed))
        tables = torch.zeros(len(needs), max(needs), dtype=torch.int32)
        for i, (blocks, need) in enumerate(zip(order.split(needs), needs, strict=True)):
            tables[i, :need] = blocks
        return tables.to(self.device)

    def random_rows(self, chunk: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield (sequence, positions, K, V), K and V [tokens, kv_heads, dim], `chunk` tokens at a time."""
        source = torch.Generator(device=self.device).manual_seed(self.seed)
        for i, context in enumerate(self.contexts):
            for at in range(0, context, chunk):
                position = torch.arange(at, min(at + chunk, context), device=self.device)
                shapes = [(len(position), self.kv_heads, dim) for dim in self.dims]
                k, v = (
                    torch.randn(shape, generator=source, device=self.device, dtype=torch.float32)
                    for shape in shapes
                )
                yield i, position, k.to(self.dtype), v.to(self.dtype)

    def step(self, tables: Tensor) -> SequenceBatch:
        """Return the step that reads the blocks in `tables`; each sequence's last tokens are the new ones."""
        return SequenceBatch(
            query_lens=(self.new,) * len(self.contexts),
            context_lens=self.contexts,
            tables=tables,
            slots=torch.zeros(0, dtype=torch.int64, device=self.device),
        )

    def layout(self, kv: str) -> KVLayout:
        """Return a layout of equal layers that together are several times as large as the last-level cache.

        The layout is staged only if the format name requests staging.
        """
        one = self._plan(kv, layers=1)
        return self._plan(kv, copies_for(self.device, round(one.kv_bytes_per_token * self.tokens)))

    def _plan(self, kv: str, layers: int) -> KVLayout:
        heads, (k_dim, v_dim) = self.kv_heads, self.dims
        geometry = ModelGeometry(
            model_type="bench",
            layers=tuple(
                LayerGeometry(index=i, kv_heads=heads, k_head_dim=k_dim, v_head_dim=v_dim, window=None)
                for i in range(layers)
            ),
            q_heads=self.q_heads,
            hidden_size=self.q_heads * k_dim,
            vocab_size=1,
            max_context=max(self.contexts),
        )
        recipe = KVRecipe.uniform(kv, [self.dims] * layers)
        if recipe.is_static:  # random rows with standard deviation 1 stay within 6
            maxima = HeadMaxima(**dict.fromkeys(("k", "v", "k_rotated", "v_rotated"), (6.0,) * heads))
            recipe = recipe.with_scales(
                StaticScales(model_digest="bench", text_digest="bench", tokens=1, layers=(maxima,) * layers)
            )
        return plan_layout(geometry, recipe, block_size=self.block_size, order=self.order)


def lengths(context: str, batch: int, seed: int) -> tuple[int, ...]:
    """Parse the lengths of all sequences: `8192`, or `128-32768` for log-normal lengths in that range.

    Raises:
        ConfigError: the text is neither a number nor a range.
    """
    try:
        low, *others = [parse_tokens(end) for end in context.split("-")]
    except ConfigError:
        low, others = 0, []
    high = others[-1] if others else low
    if len(others) > 1 or not 1 <= low <= high:
        raise ConfigError(f"--context takes a number of tokens (8192, 8k) or a range A-B, got {context!r}")
    if not others:
        return (low,) * batch
    middle, spread = (math.log(low) + math.log(high)) / 2, math.log(high / low) / 6
    draw = random.Random(seed)
    drawn = (round(draw.lognormvariate(middle, spread)) for _ in range(batch))
    return tuple(min(max(n, low), high) for n in drawn)


def filled_cache(workload: Workload, kv: str) -> tuple[KVCache, SequenceBatch, int]:
    """Return a cache with random rows in shuffled blocks, the step that reads it, and the number of layers.

    Every layer stores a copy of the rows; together, the copies are several times as large as the last-level
    cache.
    """
    layout, needs = workload.layout(kv), workload.blocks()
    layout.recipe.check_unstaged("a benchmark of writing, of new tokens or of tiles")
    cache = KVCache(layout, num_blocks=[sum(needs)], device=workload.device, backend=workload.backend)
    copies = len(layout.geometry.layers)
    return cache, filled(workload, range(copies), cache.write), copies


def filled(
    workload: Workload, layers: Iterable[int], write: Callable[[int, Tensor, Tensor, Tensor], object]
) -> SequenceBatch:
    """Write the same random rows to shuffled blocks of all layers, and return the step that reads them."""
    tables = workload.shuffled_tables()
    for i, position, k, v in workload.random_rows(_CHUNK):
        slots = slots_of(tables[i], position, workload.block_size)
        for layer in layers:
            write(layer, k, v, slots)
    return workload.step(tables)


def slots_of(table: Tensor, position: Tensor, block_size: int) -> Tensor:
    """Return the slots of a sequence's tokens."""
    return table[position // block_size].long() * block_size + position % block_size
