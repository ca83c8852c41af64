"""Conformance model: the small model, sequences and expected attention of the conformance suite."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvq.cache.backend import CacheBackend, CacheFactory, with_stores
from kvq.formats import HeadMaxima, KVFormat, KVRecipe, StaticScales
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.codec import decode, encode, rotate
from kvq.layout import BlockOrder, KVLayout, plan_layout

BLOCK_SIZE = 5  # tokens
WINDOW = 9  # tokens, of layer 1
_KV_HEADS, _Q_HEADS = 3, 6
_HEAD_DIMS = [(60, 48), (48, 60), (64, 64)]  # K and V, by layer
_WINDOWS = [None, WINDOW, None]
_LARGEST = 5.0  # absolute value of any K or V element, for static scales
# New tokens of every sequence, step by step: prefills of several lengths, an empty sequence that starts
# later, a one-token sequence that pauses, and decodes.
_STEPS = ((23, 0, 1, 7), (1, 4, 0, 6), (2, 1, 1, 1))

# Three layers in two groups, mostly with head dimensions that are not powers of two
_GEOMETRY = ModelGeometry(
    model_type="conformance",
    layers=tuple(
        LayerGeometry(index=i, kv_heads=_KV_HEADS, k_head_dim=k, v_head_dim=v, window=window)
        for i, ((k, v), window) in enumerate(zip(_HEAD_DIMS, _WINDOWS, strict=True))
    ),
    q_heads=_Q_HEADS,
    hidden_size=64,
    vocab_size=64,
    max_context=4096,
)
LAYERS = range(len(_HEAD_DIMS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of all sequences. `tables` are by layer group and sequence."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    tables: list[list[list[int]]]

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def blocks(self) -> set[tuple[int, int]]:
        """All (group, block) pairs in the step's tables."""
        return {(g, block) for g, tables in enumerate(self.tables) for table in tables for block in table}

    def batch(self, device: torch.device, group: int = 0) -> SequenceBatch:
        """Return the step's batch for one layer group; unused table entries are -1."""
        tables = self.tables[group]
        slots = [
            table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for table, new, context in zip(tables, self.query_lens, self.context_lens, strict=True)
            for at in range(context - new, context)
        ]
        width = max(map(len, tables)) + 1
        padded = [table + [-1] * (width - len(table)) for table in tables]
        return SequenceBatch.of(padded, slots, self.query_lens, self.context_lens, device)

    def with_stale_entries(self, group: int, lost: list[int], block: int) -> "Step":
        """Return this step with the first `lost[i]` entries of table i replaced by `block`."""
        tables = list(self.tables)
        tables[group] = [[block] * n + table[n:] for n, table in zip(lost, self.tables[group], strict=True)]
        return replace(self, tables=tables)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Backend under test: the function that creates it, and the KV formats."""

    make: CacheFactory
    kv: str
    order: BlockOrder
    device: torch.device
    tolerance: float
    num_blocks = (13, 14)  # by layer group: full attention, sliding window

    @cached_property
    def layout(self) -> KVLayout:
        """Layout of all layers' blocks in the `kv` format, with static scales if the format needs them."""
        recipe = KVRecipe.uniform(self.kv, _HEAD_DIMS)
        if recipe.is_static:
            heads = tuple(_LARGEST * (1 + h / 4) for h in range(_KV_HEADS))
            maxima = HeadMaxima(k=heads, v=heads, k_rotated=heads, v_rotated=heads)
            layers = (maxima,) * len(_HEAD_DIMS)
            recipe = recipe.with_scales(
                StaticScales(model_digest="", text_digest="", tokens=1, layers=layers)
            )
        return plan_layout(_GEOMETRY, recipe, block_size=BLOCK_SIZE, order=self.order)

    def cache(self) -> CacheBackend:
        return with_stores(self.make(self.layout, num_blocks=list(self.num_blocks), device=self.device))

    def steps(self) -> list[Step]:
        """Return the steps. Their blocks are scattered, and no two sequences share blocks."""
        lengths = [sum(counts) for counts in zip(*_STEPS, strict=True)]
        tables = []
        for group, count in enumerate(self.num_blocks):
            free = torch.randperm(count, generator=torch.Generator().manual_seed(group)).tolist()
            tables.append([[free.pop() for _ in range(-(-n // BLOCK_SIZE))] for n in lengths])
        contexts = [0] * len(lengths)
        steps = []
        for counts in _STEPS:
            contexts = [a + b for a, b in zip(contexts, counts, strict=True)]
            steps.append(Step(query_lens=counts, context_lens=tuple(contexts), tables=tables))
        return steps

    def options(
        self, layer: int, *, softcap: float | None = None, with_sinks: bool = False
    ) -> AttentionOptions:
        """Return the layer's scale and window, with or without a softcap and sinks."""
        sinks = (
            torch.linspace(-2, 3, _Q_HEADS, device=self.device, dtype=torch.float32) if with_sinks else None
        )
        scale = _HEAD_DIMS[layer][0] ** -0.5
        return AttentionOptions(scale=scale, window=_WINDOWS[layer], softcap=softcap, sinks=sinks)

    def rows(self, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the step's new tokens, fp32 [tokens, kv_heads, dim]."""
        parts = [
            [x[context - new : context] for x in self._history(layer, i)]
            for i, (new, context) in enumerate(zip(step.query_lens, step.context_lens, strict=True))
        ]
        k, v = (torch.cat(some).to(self.device) for some in zip(*parts, strict=True))
        return k, v

    def queries(self, step: Step, layer: int) -> Tensor:
        """Return fp32 queries [tokens, q_heads, k_head_dim]."""
        return _random((step.tokens, _Q_HEADS, _HEAD_DIMS[layer][0]), seed=sum(step.context_lens) + layer)

    def write(self, cache: CacheBackend, step: Step, layer: int) -> Tensor:
        """Write one layer's new rows of a step, and return the backend's flags for non-finite rows."""
        store = cache.stores[layer]
        return store.write(*self.rows(step, layer), store.batch_of(self.batches(step)).slots)

    def attend(
        self, cache: CacheBackend, step: Step, layer: int, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        store, q = cache.stores[layer], self.queries(step, layer).to(self.device)
        return store.attend(q, store.batch_of(self.batches(step)), options)

    def batches(self, step: Step) -> list[SequenceBatch]:
        """Return a step's batch for each layer group."""
        return [step.batch(self.device, group) for group in range(len(self.num_blocks))]

    def expected(self, step: Step, layer: int, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp in fp64 on the host, from rows as the formats store them."""
        queries = self.queries(step, layer).double().split(step.query_lens)
        results = []
        for i, (q, context) in enumerate(zip(queries, step.context_lens, strict=True)):
            k, v = (
                self._stored(x[:context], layer, part)
                for x, part in zip(self._history(layer, i), ("k", "v"), strict=True)
            )
            results.append(_attention(q, k, v, options))
        outs, lses = zip(*results, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def fill(self, cache: CacheBackend) -> list[list[Tensor]]:
        """Write random bytes to every block, and return the bytes by group and block."""
        filled = []
        for group, count in enumerate(self.num_blocks):
            size = cache.read_block(group, 0).numel()
            draw = torch.Generator().manual_seed(group)
            blocks = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw) for _ in range(count)]
            for block, content in enumerate(blocks):
                cache.write_block(group, block, content)
            filled.append(blocks)
        return filled

    def _history(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Return K and V of all positions of one sequence, fp32 [positions, kv_heads, dim]."""
        length = sum(counts[sequence] for counts in _STEPS)
        seed = 100 * layer + 10 * sequence
        k, v = (
            _random((length, _KV_HEADS, dim), seed=seed + i).clamp(-_LARGEST, _LARGEST)
            for i, dim in enumerate(_HEAD_DIMS[layer])
        )
        return k, v

    def _stored(self, x: Tensor, layer: int, part: str) -> Tensor:
        """Return `x` [tokens, kv_heads, dim] as fp64 rows after a round trip through the format."""
        recipe = self.layout.recipe
        fmt: KVFormat = getattr(recipe.layers[layer], part)
        static = None
        if fmt.is_static and recipe.static_scales is not None:
            static = torch.tensor(recipe.static_scales.layers[layer].scales(part, fmt))[:, None]
        rows = decode(*encode(x, fmt, static), fmt, static)
        return (rotate(rows) if fmt.rotated else rows).double()


def _random(shape: tuple[int, ...], *, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Attend with `q` fp64 [new, q_heads, dim], at the last positions of `k`, `v` [keys, kv_heads, dim]."""
    new, keys = q.shape[0], k.shape[0]
    shared = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(shared, dim=1)) * options.scale
    scores = options.capped(scores)
    hidden = options.hides(torch.arange(keys - new, keys)[:, None], torch.arange(keys))  # [new, keys]
    lse = torch.logsumexp(scores.masked_fill(hidden, float("-inf")), dim=-1)  # [q_heads, new]
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.double().cpu()[:, None])
    weights = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(shared, dim=1)), lse.T
