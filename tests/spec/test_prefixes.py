"""Prefix files that kvq writes are those of the specification, and it reads those of the specification."""

import json
import random
from pathlib import Path

import pytest

from kvq.blockmgr import BlockManager
from kvq.cache import KVCache
from kvq.cache.prefix_file import load_prefix, save_prefix
from kvq.formats import KVRecipe
from kvq.kernels import SequenceBatch
from kvq.layout import KVLayout, plan_layout
from tests.kernels.kit import CPU, geometry, rows_like_kv
from tools.make_vectors import FOLDER, IDENTITY, PREFIXES, described, layout_of

DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 16, None]
SIZE = 5
TOKENS = [*range(500, 554)]
CHUNK = 11  # tokens of a step
Pair = tuple[KVCache, BlockManager]


def pair(layout: KVLayout, num_blocks: int = 16) -> Pair:
    """A cache and its block manager, as `Session` puts them together."""
    cache = KVCache(layout, num_blocks=[num_blocks] * len(layout.groups), device=CPU, backend="reference")
    manager = BlockManager(
        num_blocks=cache.num_blocks, block_size=layout.block_size, identity=IDENTITY, **layout.holding
    )
    return cache, manager


def planned(kv: str) -> KVLayout:
    model = geometry(DIMS, windows=WINDOWS)
    return plan_layout(model, KVRecipe.uniform(kv, DIMS), block_size=SIZE)


def compute(cache: KVCache, manager: BlockManager, tokens: list[int]) -> None:
    """Write made-up K and V of some tokens in steps, sealing blocks as attention would."""
    sequence = manager.start(manager.prompt(tokens))
    for at in range(0, len(tokens), CHUNK):
        count = min(CHUNK, len(tokens) - at)
        slots = manager.append([(sequence, count)])
        cache.carry_out(manager.take_orders())
        batches = [
            SequenceBatch.of([table], own, [count], [at + count], CPU)
            for table, own in zip(sequence.tables, slots, strict=True)
        ]
        for layer, dims in enumerate(DIMS):
            k, v = (rows_like_kv(count, 3, dim, layer + at) for dim in dims)
            batch = cache.batch_of(layer, batches)
            cache.write(layer, k, v, batch.slots)
            if cache.layout.recipe.is_staged:
                cache.seal(layer, batch)
        manager.commit(sequence)
    manager.free(sequence)


@pytest.mark.parametrize(
    ("name", "starts"), [("plain", [0, 1]), ("staged", [0, 1, 1, 1, 0, 0])], ids=["plain", "staged"]
)
def test_kvq_loads_the_vectors(name: str, starts: list[int]) -> None:
    vector = json.loads((FOLDER / f"prefix-{name}.vector.json").read_bytes())
    layout = layout_of(PREFIXES[name])
    assert described(layout) == vector["layout"]
    cache, manager = pair(layout)
    prompt = manager.prompt(vector["tokens"])
    assert load_prefix(FOLDER / vector["file"], cache, manager, prompt) == 20
    assert manager.held_prefix(prompt)[:2] == (20, starts)


@pytest.mark.parametrize(
    ("kv", "length", "counts"),
    [
        ("int8/int4", 50, [10, 3]),
        ("int4_mean", 50, [10, 3, 1, 1]),
        ("int4+recent=9", 45, [9, 3, 3, 3]),
        ("int4_mean/int6+recent=7+sinks=7", 45, [9, 3, 3, 3, 2, 2]),
        ("int8+sinks=5", 50, [10, 3, 1, 1, 1, 1]),
        ("int8+sinks=99", 50, [10, 3, 1, 1, 10, 10]),  # fewer tokens than sinks
    ],
)
def test_the_checker_takes_what_kvq_writes(
    spec, kv: str, length: int, counts: list[int], tmp_path: Path
) -> None:
    layout, path = planned(kv), tmp_path / "p"
    cache, manager = pair(layout)
    compute(cache, manager, TOKENS)
    prompt = manager.prompt(TOKENS)
    assert save_prefix(path, cache, manager, prompt) == length
    raw, own = path.read_bytes(), spec["layouts"].read_layout(described(layout))
    _, tensors = spec["prefixes"].read_prefix(raw)
    assert [len(tensors[f"group.{g}"]) for g in range(len(counts))] == counts
    assert spec["prefixes"].check_prefix(raw, own)["length"] == length
    other = pair(layout)
    assert load_prefix(path, *other, prompt) == length
    assert other[1].held_prefix(prompt)[:2] == manager.held_prefix(prompt)[:2]
    other[1].check_integrity()
    source = random.Random(31)
    for _ in range(100):
        at = source.randrange(len(raw))
        with pytest.raises(spec["recipes"].Wrong):
            spec["prefixes"].check_prefix(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], own)
