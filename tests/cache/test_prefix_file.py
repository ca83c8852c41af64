"""Persisted prefixes: the same bytes come back, or nothing does."""

import json
import logging
import random
import resource
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from kvq.blockmgr import BlockManager, Copy, PrefixQuery
from kvq.blockmgr.pool import BlockId
from kvq.cache import KVCache
from kvq.cache.digests import header_text, seal
from kvq.cache.prefix_file import load_prefix, save_prefix
from kvq.errors import ConfigError
from kvq.kernels import AttentionOptions, SequenceBatch, Support
from kvq.kernels.gpu import support
from kvq.layout import BlockOrder
from tests.kernels.kit import POISON, poisoned_cache, rows_like_kv, slot_bytes

DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 16, None]
SIZE = 5
TOKENS = list(range(100, 141))  # 8 blocks and a token
Pair = tuple[KVCache, BlockManager]


def pair(
    kv: str = "int4",
    *,
    order: BlockOrder = BlockOrder.LAYER_MAJOR,
    windows: list[int | None] = WINDOWS,
    block_size: int = SIZE,
    num_blocks: int = 12,
    identity: bytes = b"model a",
    backend: str = "reference",
) -> Pair:
    """A poisoned cache and its block manager."""
    cache = poisoned_cache(
        kv, DIMS, windows=windows, block_size=block_size, num_blocks=num_blocks, order=order, backend=backend
    )
    own = [group.group.window for group in cache.layout.groups]
    manager = BlockManager(num_blocks=cache.num_blocks, block_size=block_size, windows=own, identity=identity)
    return cache, manager


def run(cache: KVCache, manager: BlockManager, prompt: PrefixQuery) -> None:
    """Compute a prompt: write made-up K and V of every token and layer, then leave them cached."""
    sequence = manager.start(prompt)
    slots = manager.append([(sequence, len(prompt.tokens) - sequence.length)])
    cache.carry_out(manager.take_orders())
    for layer, dims in enumerate(DIMS):
        own = torch.tensor(slots[cache.group_of[layer]])
        k, v = (rows_like_kv(len(own), 3, dim, layer) for dim in dims)
        cache.write(layer, k, v, own)
    manager.commit(sequence)
    manager.free(sequence)


def attention(cache: KVCache, manager: BlockManager, prompt: PrefixQuery) -> list[Tensor]:
    """What one more token attends to over the prompt's held prefix, by layer."""
    length, _, tables = manager.prefixes.held(prompt)
    outs = []
    for layer, (k_dim, _) in enumerate(DIMS):
        group = cache.group_of[layer]
        batch = SequenceBatch(
            query_lens=(1,),
            context_lens=(length,),
            tables=torch.tensor([tables[group]], dtype=torch.int32),
            slots=torch.empty(0, dtype=torch.int64),
        )
        q = rows_like_kv(1, 3, k_dim, 77)
        window = 15 if group else None  # what is left of it for the token that comes next
        outs.append(cache.attend(layer, q, batch, AttentionOptions(scale=0.1, window=window))[0])
    return outs


def saved(path: Path, kv: str = "int4", **options: object) -> Pair:
    """A pair that computed TOKENS and saved them."""
    cache, manager = pair(kv, **options)  # type: ignore[arg-type]
    run(cache, manager, manager.prompt(TOKENS))
    assert save_prefix(path, cache, manager, manager.prompt(TOKENS)) == 40
    return cache, manager


def untouched(cache: KVCache, manager: BlockManager) -> None:
    """Nothing is indexed, nothing is taken, no byte is written."""
    manager.check_integrity()
    for group, usage in enumerate(manager.usage()):
        assert (usage.free, usage.cached, usage.live) == (cache.num_blocks[group], 0, 0)
        assert (cache.pool(group) == POISON).all()
    assert manager.take_orders() == []


@pytest.mark.parametrize("order", list(BlockOrder))
@pytest.mark.parametrize("kv", ["fp32", "int8", "fp8_per_head", "int4", "int4_gQ_rot", "k8v4"])
def test_a_prefix_comes_back_bit_for_bit(kv: str, order: BlockOrder, tmp_path: Path) -> None:
    old = saved(tmp_path / "p", kv, order=order)
    cache, manager = pair(kv, order=order)
    prompt = manager.prompt(TOKENS)
    assert manager.lookup(prompt).length == 0
    assert load_prefix(tmp_path / "p", cache, manager, prompt) == 40
    manager.check_integrity()
    assert manager.lookup(prompt).length == 40
    assert [usage.live for usage in manager.usage()] == [0, 0]
    assert [usage.cached for usage in manager.usage()] == [8, 3]  # all blocks; the last window's
    (length, starts, tables), (_, _, before) = manager.prefixes.held(prompt), old[1].prefixes.held(prompt)
    assert (length, starts) == (40, [0, 5])
    for group, start in enumerate(starts):
        for new, known in zip(tables[group][start:], before[group][start:], strict=True):
            assert torch.equal(cache.read_block(group, new), old[0].read_block(group, known))
    for got, expected in zip(attention(cache, manager, prompt), attention(*old, prompt), strict=True):
        assert torch.equal(got, expected)


def limited_pair() -> Pair:
    """A pair whose full layers keep the first two blocks only."""
    cache, _ = pair()
    first, *others = cache.layout.groups
    cache.layout = replace(cache.layout, groups=(replace(first, limit=2 * SIZE), *others))
    windows = [group.group.window for group in cache.layout.groups]
    return cache, BlockManager(
        num_blocks=cache.num_blocks,
        block_size=SIZE,
        windows=windows,
        limits=[2 * SIZE, None],
        identity=b"model a",
    )


def test_of_a_group_that_keeps_the_first_tokens_a_file_has_those(tmp_path: Path) -> None:
    (old, before), (new, after) = limited_pair(), limited_pair()
    prompt = before.prompt(TOKENS)
    run(old, before, prompt)
    assert save_prefix(tmp_path / "p", old, before, prompt) == 40
    assert load_prefix(tmp_path / "p", new, after, prompt) == 40
    assert [usage.cached for usage in after.usage()] == [2, 3]
    for block, known in zip(
        after.prefixes.held(prompt)[2][0], before.prefixes.held(prompt)[2][0], strict=True
    ):
        assert torch.equal(new.read_block(0, block), old.read_block(0, known))


def scale_bytes(cache: KVCache, group: int, block: int) -> Tensor:
    """bool [block_bytes] of `read_block`: True where scales lie."""
    parts = []
    for layer in cache.layout.groups[group].layers:
        mask = torch.zeros(layer.nbytes, dtype=torch.bool)
        for region in (layer.k_scales, layer.v_scales):
            mask[region.offset : region.offset + region.nbytes] = True
        parts.append(mask)
    return torch.cat(parts)


def contents(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """The header and the bytes of all tensors of a file; safetensors writes its metadata in any order."""
    with safe_open(path, "pt") as file:
        names = sorted(file.keys())
        return file.metadata(), {name: file.get_tensor(name).numpy().tobytes() for name in names}


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "kv", ["int8", "fp8_rot", "int4", "int4_gQ_rot", "k8v4", "int2/bf16", "int2_gQ/bf16"]
)
def test_files_and_blocks_are_the_same_bytes_whichever_kernels_wrote_them(
    kv: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And each reads what another wrote: what a GPU's kernels keep fits a CPU's, and the other way round."""
    monkeypatch.setattr(support, "supports_linear", lambda *_: Support(True))  # Triton's, interpreted
    written = {name: saved(tmp_path / name, kv, backend=name) for name in ("reference", "cpu", "triton")}
    files = [contents(tmp_path / name) for name in written]
    assert files[0] == files[1] == files[2]
    outs = []
    for name, other in (("cpu", "triton"), ("triton", "cpu"), ("reference", "triton")):
        cache, manager = pair(kv, backend=name)
        assert cache.backend_of("attend", 0) == name
        prompt = manager.prompt(TOKENS)
        assert load_prefix(tmp_path / other, cache, manager, prompt) == 40
        outs.append(attention(cache, manager, prompt))
        blocks = manager.prefixes.held(prompt)[2][0], written[other][1].prefixes.held(prompt)[2][0]
        for new, old in zip(*blocks, strict=True):  # what goes to the tiers
            assert torch.equal(cache.read_block(0, new), written[other][0].read_block(0, old))
    for layer in range(len(DIMS)):
        for out in outs[:2]:
            torch.testing.assert_close(out[layer], outs[2][layer], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("order", list(BlockOrder))
@pytest.mark.parametrize("kv", ["int8", "fp8", "int4", "k8v4", "int4/bf16", "int8/int4_gQ_rot"])
def test_bug_8_a_persisted_prefix_brings_its_scales(
    kv: str, order: BlockOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = saved(tmp_path / "p", kv, order=order)
    prompt = old[1].prompt(TOKENS)
    cache, manager = pair(kv, order=order)
    load_prefix(tmp_path / "p", cache, manager, prompt)
    expected = attention(*old, prompt)
    _, starts, tables = manager.prefixes.held(prompt)
    for group in (0, 1):
        for i in range(starts[group], 8):
            mask = scale_bytes(cache, group, tables[group][i])
            assert mask.any()
            known = old[1].prefixes.held(prompt)[2][group][i]
            kept = old[0].read_block(group, known)[mask]
            assert kept.any()
            assert torch.equal(cache.read_block(group, tables[group][i])[mask], kept)
    assert all(torch.equal(a, b) for a, b in zip(attention(cache, manager, prompt), expected, strict=True))

    def codes_only(self: KVCache, group: int, block: int) -> Tensor:
        return read(self, group, block).masked_fill(scale_bytes(self, group, block), 0)

    read = KVCache.read_block
    monkeypatch.setattr(KVCache, "read_block", codes_only)
    save_prefix(tmp_path / "codes", *old, prompt)
    monkeypatch.undo()
    cache, manager = pair(kv, order=order)
    assert load_prefix(tmp_path / "codes", cache, manager, prompt) == 40
    broken = attention(cache, manager, prompt)  # what the bug did: finite, plausible, wrong
    for got, right in zip(broken, expected, strict=True):
        assert torch.isfinite(got).all()
        assert (got - right).abs().max() > 0.1 * right.abs().max()


def test_static_scales_are_bound_through_the_recipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "p", "fp8_per_head")
    cache, manager = pair("fp8_per_head")
    scales = cache.layout.recipe.static_scales
    assert scales is not None
    object.__setattr__(scales.layers[1], "v", tuple(x * 1.001 for x in scales.layers[1].v))
    assert load_prefix(tmp_path / "p", cache, manager, manager.prompt(TOKENS)) == 0
    assert "another recipe" in caplog.text
    untouched(cache, manager)


def test_either_block_order_reads_what_the_other_wrote(tmp_path: Path) -> None:
    a, b = BlockOrder
    old = saved(tmp_path / "p", order=a)
    new = pair(order=b)
    prompt = new[1].prompt(TOKENS)
    assert load_prefix(tmp_path / "p", *new, prompt) == 40
    for got, expected in zip(attention(*new, prompt), attention(*old, prompt), strict=True):
        assert torch.equal(got, expected)


def test_a_longer_prompt_with_the_same_start_uses_the_file(tmp_path: Path) -> None:
    saved(tmp_path / "p")
    cache, manager = pair()
    prompt = manager.prompt([*TOKENS[:40], 7, 7, 7, 7, 7, 7, 7])
    assert load_prefix(tmp_path / "p", cache, manager, prompt) == 40
    assert manager.lookup(prompt).length == 40
    assert manager.lookup(manager.prompt([*TOKENS[:39], 1, 2])).length < 40


def test_what_is_there_already_is_not_held_twice(tmp_path: Path) -> None:
    cache, manager = saved(tmp_path / "p", num_blocks=24)
    before = [usage.cached for usage in manager.usage()]
    assert load_prefix(tmp_path / "p", cache, manager, manager.prompt(TOKENS)) == 40
    assert [usage.cached for usage in manager.usage()] == before
    manager.check_integrity()


MISSES = {
    "recipe": ({"kv": "int8"}, TOKENS, "", "another layout"),
    "block size": ({"block_size": 4}, TOKENS, "", "another layout"),
    "layer groups": ({"windows": [None, 17, None]}, TOKENS, "", "another layout"),
    "windows swapped": ({"windows": [16, None, 16]}, TOKENS, "", "another layout"),
    "model": ({"identity": b"model b"}, TOKENS, "", "another model, recipe or salt"),
    "tenant": ({}, TOKENS, "b", "another model, recipe or salt"),
    "tokens": ({}, [*TOKENS[:39], 1, 2, 3], "", "other tokens than the prompt starts with"),
    "first token": ({}, [0, *TOKENS[1:]], "", "other tokens than the prompt starts with"),
    "shorter prompt": ({}, TOKENS[:39], "", "holds 40 tokens, the prompt has 39|larger than all blocks"),
    "too few blocks": ({"num_blocks": 7}, TOKENS, "", "need 8 blocks"),
}


@pytest.mark.parametrize("case", MISSES)
def test_whatever_does_not_fit_is_a_miss_with_its_reason(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options, tokens, tenant, reason = MISSES[case]
    saved(tmp_path / "p")
    cache, manager = pair(**options)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "kvq"):
        assert load_prefix(tmp_path / "p", cache, manager, manager.prompt(tokens, tenant=tenant)) == 0
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert f"prefix file {tmp_path / 'p'} is not used: " in message
    assert any(text in message for text in reason.split("|")), message
    assert "\n" not in message
    untouched(cache, manager)


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log lines from thousands of expected misses."""
    logger = logging.getLogger("kvq")
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.mark.usefixtures("quiet")
def test_a_flipped_bit_anywhere_in_the_file_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "p"
    saved(path, "int4")
    content = bytearray(path.read_bytes())
    cache, manager = pair("int4")
    prompt = manager.prompt(TOKENS)
    (header,) = struct.unpack("<Q", content[:8])
    bits = list(range(8 * (8 + header)))  # every bit of the header and its length
    bits += random.Random(3).sample(range(bits[-1] + 1, 8 * len(content)), 2000)
    with open(path, "r+b", buffering=0) as file:
        for bit in bits:
            at = bit // 8
            file.seek(at)
            file.write(bytes([content[at] ^ 1 << bit % 8]))
            assert load_prefix(path, cache, manager, prompt) == 0, f"bit {bit}"
            file.seek(at)
            file.write(content[at : at + 1])
    untouched(cache, manager)
    assert load_prefix(path, cache, manager, prompt) == 40


@pytest.mark.usefixtures("quiet")
def test_a_file_cut_or_extended_anywhere_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "p"
    saved(path)
    content = path.read_bytes()
    cache, manager = pair()
    lengths = [*range(32), *range(32, len(content), 997), len(content) - 1]
    for length in lengths:
        path.write_bytes(content[:length])
        assert load_prefix(path, cache, manager, manager.prompt(TOKENS)) == 0, length
    for junk in (b"\0", b"x" * 100, bytes(2 << 20)):
        path.write_bytes(content + junk)
        assert load_prefix(path, cache, manager, manager.prompt(TOKENS)) == 0
    untouched(cache, manager)


def resealed(path: Path, write: Callable[[dict[str, object]], str] = header_text, **changes: object) -> None:
    """Rewrite a file's header with a seal that holds, as somebody who means it would."""
    raw = path.read_bytes()
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["kvq"])
    text = write({**header, **changes})
    path.write_bytes(save(load(raw), {"kvq": text, "seal": seal(text)}))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": 2},
        {"format_version": True},
        {"length": -40},
        {"length": 0},
        {"length": 39},
        {"length": 10**30},
        {"length": "40"},
        {"length": None},
        {"length": 35},
        {"starts": [0, 4]},
        {"starts": [-1, 5]},
        {"starts": [0]},
        {"starts": [0, 10**30]},
        {"starts": [0, "5"]},
        {"starts": [True, 5]},
        {"starts": [False, 5]},
        {"length": 40.0},
        {"format_version": 1.0},
        {"starts": {}},
        {"blocks": []},
        {"blocks": None},
        {"tokens": 3},
        {"extra": 1},
    ],
)
def test_a_crafted_header_is_a_miss_and_never_an_error(changes: dict[str, object], tmp_path: Path) -> None:
    saved(tmp_path / "p")
    cache, manager = pair()
    resealed(tmp_path / "p")
    assert load_prefix(tmp_path / "p", *pair(), pair()[1].prompt(TOKENS)) == 40
    resealed(tmp_path / "p", **changes)
    assert load_prefix(tmp_path / "p", cache, manager, manager.prompt(TOKENS)) == 0
    untouched(cache, manager)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "write",
    [
        lambda header: json.dumps(dict(reversed(header.items()))),
        lambda header: header_text(header) + " ",
        lambda header: header_text(header).replace("{", '{"length": 40, ', 1),
        lambda header: header_text([header]),
        lambda header: "[" * 100_000,
    ],
)
def test_a_header_in_another_spelling_is_a_miss(
    write: Callable[[dict[str, object]], str], tmp_path: Path
) -> None:
    saved(tmp_path / "p")
    resealed(tmp_path / "p", write, **{"starts": [0, 5], "length": 40})
    cache, manager = pair()
    assert load_prefix(tmp_path / "p", cache, manager, manager.prompt(TOKENS)) == 0
    untouched(cache, manager)


def test_prompts_and_salts_are_not_in_the_file(tmp_path: Path) -> None:
    cache, manager = pair()
    prompt = manager.prompt(TOKENS, tenant="a secret tenant")
    run(cache, manager, prompt)
    save_prefix(tmp_path / "p", cache, manager, prompt)
    content = (tmp_path / "p").read_bytes()
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o600
    assert b"secret" not in content
    assert prompt.root not in content
    assert prompt.root.hex().encode() not in content
    assert prompt.data[:20] not in content


def test_an_error_while_blocks_are_filled_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "p")
    cache, manager = pair()
    calls = 0

    def fails(self: KVCache, group: int, block: int, content: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(KVCache, "write_block", fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        load_prefix(tmp_path / "p", cache, manager, manager.prompt(TOKENS))
    untouched(cache, manager)


def test_a_missing_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    cache, manager = pair()
    for path, reason in (("nothing", "there is no such file"), (".", "it is not a regular file")):
        with pytest.raises(ConfigError, match=f"can't load a prefix from .*{reason}; write one with save"):
            load_prefix(tmp_path / path, cache, manager, manager.prompt(TOKENS))
    with pytest.raises(ConfigError, match="can't load a prefix"):
        load_prefix("a\0b", cache, manager, manager.prompt(TOKENS))


def test_saving_needs_a_prefix_and_a_place(tmp_path: Path) -> None:
    cache, manager = pair()
    prompt = manager.prompt(TOKENS)
    with pytest.raises(ConfigError, match="no whole block of 5 tokens of this prompt is in the cache; run"):
        save_prefix(tmp_path / "p", cache, manager, prompt)
    run(cache, manager, prompt)
    with pytest.raises(ConfigError, match="there is no folder"):
        save_prefix(tmp_path / "no" / "p", cache, manager, prompt)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_file_and_an_older_one_as_it_was(tmp_path: Path) -> None:
    cache, manager = saved(tmp_path / "p")
    before = (tmp_path / "p").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        for name in ("p", "q"):
            with pytest.raises(ConfigError, match=r"can't write .*: File too large"):
                save_prefix(tmp_path / name, cache, manager, manager.prompt(TOKENS))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [x.name for x in tmp_path.iterdir()] == ["p"]
    assert (tmp_path / "p").read_bytes() == before


def test_waiting_orders_strange_pairs_and_nameless_models_are_refused(tmp_path: Path) -> None:
    cache, manager = saved(tmp_path / "p")
    prompt = manager.prompt(TOKENS)
    manager.blocks.orders.append(Copy(group=0, source=BlockId(0), target=BlockId(1)))
    for call in (save_prefix, load_prefix):
        with pytest.raises(ConfigError, match=r"1 orders wait .*carry_out\(manager.take_orders\(\)\) first"):
            call(tmp_path / "p", cache, manager, prompt)
        with pytest.raises(ConfigError, match="use the pair that belongs together"):
            call(tmp_path / "p", cache, pair(num_blocks=13)[1], prompt)
        with pytest.raises(ConfigError, match="has no identity; make it with identity = model digest"):
            call(tmp_path / "p", *pair(identity=b""), prompt)


def test_slots_of_other_blocks_keep_their_bytes(tmp_path: Path) -> None:
    saved(tmp_path / "p")
    cache, manager = pair()
    load_prefix(tmp_path / "p", cache, manager, manager.prompt(TOKENS))
    _, starts, tables = manager.prefixes.held(manager.prompt(TOKENS))
    for group, layers in ((0, (0, 2)), (1, (1,))):
        written = torch.zeros(cache.pool(group).numel(), dtype=torch.bool)
        slots = [block * SIZE + i for block in tables[group][starts[group] :] for i in range(SIZE)]
        for layer in layers:
            written |= slot_bytes(cache, layer, slots, padding=True)
        assert (cache.pool(group)[~written] == POISON).all()
