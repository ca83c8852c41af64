"""Prefix files that kvq writes are those of the specification, and it reads those of the specification."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvq.blockmgr import BlockManager
from kvq.cache import KVCache
from kvq.cache.digests import header_text, seal
from kvq.cache.prefix_file import load_prefix, save_prefix
from kvq.formats import KVRecipe
from kvq.kernels import SequenceBatch
from kvq.layout import KVLayout, plan_layout
from tests.kernels.kit import CPU, geometry, rows_like_kv
from tests.spec.test_check import run
from tools.make_vectors import FOLDER, IDENTITY, PREFIXES, described, layout_of

DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 16, None]
SIZE = 5
TOKENS = [*range(500, 554)]
CHUNK = 11  # tokens of a step
Pair = tuple[KVCache, BlockManager]


def pair(layout: KVLayout, num_blocks: int = 16) -> Pair:
    """A cache and its block manager, as `Session` puts them together, with others' bytes in its pools."""
    cache = KVCache(layout, num_blocks=[num_blocks] * len(layout.groups), device=CPU, backend="reference")
    for group in range(len(layout.groups)):
        cache.pool(group).fill_(0x5A)
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
                cache.stores[layer].seal(batch)
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
    assert manager.prefixes.held(prompt)[:2] == (20, starts)


@pytest.mark.parametrize(
    ("kv", "length", "counts"),
    [
        ("int8/int4", 50, [10, 3]),
        ("int4_mean", 50, [10, 3, 1, 1]),
        ("int4+recent=9", 45, [9, 3, 3, 3]),
        ("int4_mean/int6+recent=7+sinks=7", 45, [9, 3, 3, 3, 2, 2]),
        ("int8+sinks=5", 50, [10, 3, 1, 1, 1, 1]),
        ("int8+sinks=99", 50, [10, 3, 1, 1, 10, 10]),  # fewer tokens than sinks
        ("int8+recent=16", 35, [7, 4, 4, 4]),  # the window ends within them: none of its blocks is sealed
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
    assert other[1].prefixes.held(prompt)[:2] == manager.prefixes.held(prompt)[:2]
    other[1].check_integrity()
    source = random.Random(31)
    for _ in range(100):
        at = source.randrange(len(raw))
        with pytest.raises(spec["findings"].Wrong):
            spec["prefixes"].check_prefix(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], own)


def rebuilt(raw: bytes, header: str, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A prefix file with another header under a seal that holds, and its container changed besides."""
    end = 8 + int.from_bytes(raw[:8], "little")
    container = json.loads(raw[8:end])
    container["__metadata__"] = {"kvq": header, "seal": seal(header)}
    change(container)
    text = json.dumps(container).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text + raw[end:]


def header_of(raw: bytes) -> dict[str, Any]:
    container = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return json.loads(container["__metadata__"]["kvq"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format_version": 1.0}, "format_version: 1.0 is no whole number"),
        ({"format_version": 2}, "format_version: 2 is not 1 to 1"),
        ({"length": True}, "length: True is no whole number"),
        ({"length": -20}, "length: -20 is not 1 to"),
        ({"length": "20"}, "length: '20' is no whole number"),
        ({"length": 15}, r"group\.0: shape \[4, 1264\], expected \[3, 1264\]"),
        ({"starts": 3}, "starts: no list"),
        ({"starts": [False, 1, 1, 1, 0, 0]}, r"starts\[0\]: False is no whole number"),
        ({"starts": [0, 0, 1, 1, 0, 0]}, r"starts\[1\]: 0, expected 1"),
        ({"starts": [0, 1, 1, 1, 0, 1]}, r"starts\[5\]: 1, expected 0"),
        ({"blocks": None}, "blocks: no list"),
        ({"blocks": [1] * 6}, r"blocks\[0\]: 1 is no text"),
        ({"root": None}, "root: None is no text"),
        ({"extra": 1}, "__metadata__.kvq: unknown key 'extra'"),
    ],
)
def test_a_header_of_another_kind_is_named_and_a_miss(
    spec, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    vector = json.loads((FOLDER / "prefix-staged.vector.json").read_bytes())
    raw, layout = (FOLDER / "staged.kvqprefix").read_bytes(), spec["layouts"].read_layout(vector["layout"])
    header, path = header_of(raw), tmp_path / "p"
    cache, manager = pair(layout_of(PREFIXES["staged"]))
    for crafted, good in (({**header, **changes}, False), (header, True)):
        path.write_bytes(rebuilt(raw, header_text(crafted), lambda container: None))
        if good:
            spec["prefixes"].check_prefix(path.read_bytes(), layout)
        else:
            with pytest.raises(spec["findings"].Wrong, match=said):
                spec["prefixes"].check_prefix(path.read_bytes(), layout)
        assert load_prefix(path, cache, manager, manager.prompt(vector["tokens"])) == 20 * good


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("group.5"), "tensors: "),
        (lambda c: c.update({"group.0": 5}), "group.0: no JSON object"),
        (lambda c: c["group.0"].update(shape=[4, True]), "group.0.shape: True is no whole number"),
        (lambda c: c["group.0"].update(shape=[-4, -1264]), "group.0.shape: -4 is not 0 to"),
        (lambda c: c["group.0"].update(data_offsets=[0]), "group.0.data_offsets: 1 items, expected 2"),
        (lambda c: c["group.0"].update(dtype=["U8"]), "group.0: dtype, shape and data_offsets don't fit"),
        (lambda c: c["__metadata__"].update(kvq=7), "__metadata__.kvq: 7 is no text"),
        (
            lambda c: c["__metadata__"].update(kvq="[" * 9999),
            "__metadata__.kvq: nested deeper than 64 levels",
        ),
        (lambda c: c.update(__metadata__=None), "__metadata__: no JSON object"),
    ],
)
def test_a_container_of_another_kind_is_named(spec, change: Callable, said: str) -> None:
    raw = (FOLDER / "staged.kvqprefix").read_bytes()
    with pytest.raises(spec["findings"].Wrong) as wrong:
        spec["prefixes"].check_prefix(rebuilt(raw, header_text(header_of(raw)), change))
    assert str(wrong.value).startswith(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 0}, "block_size: 0 is not 1 to 4096"),
        ({"block_size": 5.0}, "block_size: 5.0 is no whole number"),
        ({"block_size": True}, "block_size: True is no whole number"),
        ({"geometry": {}}, "geometry: no list"),
        ({"geometry": []}, "geometry: 0 items, expected 2"),
        ({"geometry": [1, 2]}, "geometry[0]: no JSON object"),
        ({"recipe": []}, "kvq.json: no JSON object"),
        ({"kv_heads": 0}, "geometry[0].kv_heads: 0 is not 1 to"),
        ({"k_head_dim": 64}, "geometry[0].k_head_dim: 64 is not 60 to 60"),
        ({"window": 0}, "geometry[0].window: 0 is not 1 to"),
        ({"window": "16"}, "geometry[0].window: '16' is no whole number"),
        ({"x": 1}, "geometry[0]: unknown key 'x'"),
    ],
)
def test_a_layout_that_is_none_is_named(spec, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    layout = json.loads((FOLDER / "prefix-plain.vector.json").read_bytes())["layout"]
    whole = {"block_size", "geometry", "recipe"}
    layout.update({key: value for key, value in change.items() if key in whole})
    if not whole & set(change):
        layout["geometry"][0].update(change)
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(layout))
    found = run(FOLDER / "plain.kvqprefix", "--layout", path)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(f"wrong: {said}")


def test_blocks_of_one_token_leave_their_window_empty(spec, tmp_path: Path) -> None:
    """Nothing of the recent group is held then: its tensor has no rows."""
    model = geometry(DIMS, windows=WINDOWS)
    layout = plan_layout(model, KVRecipe.uniform("int8+sinks=2", DIMS), block_size=1)
    cache, manager = pair(layout, 64)
    compute(cache, manager, TOKENS)
    prompt = manager.prompt(TOKENS)
    assert save_prefix(tmp_path / "p", cache, manager, prompt) == 54
    own = spec["layouts"].read_layout(described(layout))
    assert spec["prefixes"].check_prefix((tmp_path / "p").read_bytes(), own)["starts"][2] == 54
    other = pair(layout, 64)
    assert load_prefix(tmp_path / "p", *other, prompt) == 54
    assert other[1].prefixes.held(prompt)[0] == 54
