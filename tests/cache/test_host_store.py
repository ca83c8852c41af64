"""The host store: what comes back is what went out, or it is a miss."""

import errno
import logging
import os
import random
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvq.cache import host_store, memory
from kvq.cache.digests import block_digest, digest_context, layout_numbers
from kvq.cache.host_store import HostStore
from kvq.errors import ConfigError, OutOfMemory
from kvq.formats import ExactTokens, KVRecipe
from kvq.layout import BlockOrder, KVLayout, Region, Role, plan_layout
from tests.kernels.kit import KINDS, geometry, recipe_of, static_scales

DIMS = [(60, 48), (48, 60), (64, 64)]
WINDOWS = [None, 16, None]
SLOTS = [5, 3]


def planned(kv: str, order: BlockOrder = BlockOrder.LAYER_MAJOR) -> tuple[KVLayout, KVRecipe]:
    """Two layer groups in that format."""
    model = geometry(DIMS, windows=WINDOWS)
    recipe = recipe_of(kv, DIMS)
    if recipe.is_static:
        recipe = recipe.with_scales(static_scales(model.kv_heads))
    return plan_layout(model, recipe, block_size=3, order=order), recipe


def store(kv: str = "int4", folder: Path | None = None, slots: list[int] = SLOTS) -> HostStore:
    """A store for `planned(kv)`."""
    return HostStore(planned(kv)[0], slots, folder)


def block(held: HostStore, group: int, seed: int = 0) -> torch.Tensor:
    """Random bytes of one block."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (held._sizes[group],), dtype=torch.uint8, generator=draw)


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where blocks are kept: in memory, or in a file in that folder."""
    return tmp_path if request.param == "file" else None


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log lines from thousands of expected misses."""
    logger = logging.getLogger("kvq")
    logger.disabled = True
    yield
    logger.disabled = False


def test_every_slot_gives_back_what_it_was_given(folder: Path | None) -> None:
    held = store(folder=folder)
    places = [(group, slot) for group, count in enumerate(SLOTS) for slot in range(count)]
    for seed, (group, slot) in enumerate(places):
        held.put(group, slot, block(held, group, seed))
    for seed, (group, slot) in enumerate(places):
        got = held.get(group, slot)
        assert got is not None
        assert torch.equal(got, block(held, group, seed))
    held.put(0, 2, block(held, 0, 99))  # a slot is used again
    again = held.get(0, 2)
    assert again is not None
    assert torch.equal(again, block(held, 0, 99))
    held.close()


def test_bytes_reported_are_bytes_reserved(tmp_path: Path) -> None:
    layout, _ = planned("int4")
    total = sum(n * group.block_bytes for n, group in zip(SLOTS, layout.groups, strict=True))
    in_memory, in_file = store(), store(folder=tmp_path)
    assert in_memory.nbytes == in_file.nbytes == total
    assert in_memory._storage._bytes.numel() == total
    status = os.fstat(in_file._storage._file.fileno())
    assert status.st_size == total
    assert status.st_blocks * 512 >= total  # taken on the disk, not only promised
    assert status.st_mode & 0o077 == 0
    in_file.close()


@pytest.mark.usefixtures("quiet")
def test_ten_thousand_flipped_bits_are_each_found() -> None:
    draw = random.Random(11)
    flips, kinds = 0, (*KINDS, "int4_gQ_rot", "int2_gQ/int6")
    per_case = -(-10_000 // (2 * len(kinds)))
    for kv in kinds:
        held = store(kv)
        for group in (0, 1):
            slot = draw.randrange(SLOTS[group])
            content = block(held, group, flips)
            held.put(group, slot, content)
            stored = held._storage.read(held._offset(group, slot), content.numel())
            for _ in range(per_case):
                bit = draw.randrange(8 * content.numel())
                stored[bit // 8] ^= 1 << bit % 8
                assert held.get(group, slot) is None, (kv, group, bit)
                stored[bit // 8] ^= 1 << bit % 8
                flips += 1
            assert held.get(group, slot) is not None
    assert flips >= 10_000


@pytest.mark.usefixtures("quiet")
def test_a_flipped_bit_in_the_file_is_found(tmp_path: Path) -> None:
    held = store(folder=tmp_path)
    content = block(held, 1)
    held.put(1, 2, content)
    file, at = held._storage._file.fileno(), held._offset(1, 2)
    for bit in random.Random(2).sample(range(8 * content.numel()), 500):
        byte = os.pread(file, 1, at + bit // 8)
        os.pwrite(file, bytes([byte[0] ^ 1 << bit % 8]), at + bit // 8)
        assert held.get(1, 2) is None
        os.pwrite(file, byte, at + bit // 8)
    assert held.get(1, 2) is not None
    os.truncate(file, at + content.numel() - 1)
    assert held.get(1, 2) is None
    held.close()


def test_an_older_block_or_a_neighbours_that_comes_back_is_a_miss(
    folder: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    held = store(folder=folder)
    old, new = block(held, 0, 1), block(held, 0, 2)
    held.put(0, 1, old)
    held.put(0, 1, new)
    held.put(0, 2, old)
    held._storage.write(held._offset(0, 1), old)  # a lost write
    assert held.get(0, 1) is None
    held._storage.write(held._offset(0, 2), new)  # a write that went elsewhere
    assert held.get(0, 2) is None
    assert "changed outside: group 0, slot 1; a miss" in caplog.text
    held.close()


def test_a_digest_holds_for_one_place_layout_recipe_and_group_only() -> None:
    layout, recipe = planned("int8_per_head")
    content = torch.arange(100, dtype=torch.uint8)
    group = layout.groups[0]
    known = block_digest(content, 3, digest_context(group, recipe))
    assert len(known) == 16
    assert block_digest(content, 3, digest_context(group, recipe)) == known
    other = static_scales([3, 3, 3])
    changed = replace(other, layers=(replace(other.layers[0], k=(9.0, 9.0, 9.0)), *other.layers[1:]))
    region = replace(group.layers[1].v_scales, offset=16)
    layers = (group.layers[0], replace(group.layers[1], v_scales=region))
    with_means = replace(group.layers[0], k_means=Region(offset=0, row_bytes=34, nbytes=102))
    variants = [
        block_digest(content, 4, digest_context(group, recipe)),
        block_digest(content[:-1], 3, digest_context(group, recipe)),
        block_digest(content, 3, digest_context(layout.groups[1], recipe)),
        block_digest(content, 3, digest_context(group, recipe.with_scales(changed))),
        block_digest(content, 3, digest_context(replace(group, block_size=4), recipe)),
        block_digest(content, 3, digest_context(replace(group, layers=layers), recipe)),
        block_digest(content, 3, digest_context(replace(group, role=Role.RECENT), recipe)),
        block_digest(content, 3, digest_context(replace(group, limit=32), recipe)),
        block_digest(content, 3, digest_context(group, replace(recipe, exact=ExactTokens(sinks=4)))),
        block_digest(
            content, 3, digest_context(replace(group, layers=(with_means, *group.layers[1:])), recipe)
        ),
        block_digest(content, 3, digest_context(replace(group, layers=group.layers[::-1]), recipe)),
    ]
    assert len({known, *variants}) == 1 + len(variants)


def test_the_layout_version_is_in_every_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, recipe = planned("int4")
    content = torch.zeros(8, dtype=torch.uint8)
    before = block_digest(content, 0, digest_context(layout.groups[0], recipe))
    monkeypatch.setattr("kvq.cache.digests.VERSION", 2)
    assert block_digest(content, 0, digest_context(layout.groups[0], recipe)) != before


def test_block_order_does_not_change_what_a_block_is() -> None:
    a, b = (planned("int4", order)[0] for order in BlockOrder)
    assert [layout_numbers(g) for g in a.groups] == [layout_numbers(g) for g in b.groups]


def test_an_empty_slot_is_a_miss_and_one_that_is_not_there_an_error(folder: Path | None) -> None:
    held = store(folder=folder)
    assert held.get(0, 0) is None
    for slot in (5, -1):
        with pytest.raises(ConfigError, match=rf"group 0 has 5 host slots, got slot {slot}; give the block"):
            held.get(0, slot)
        with pytest.raises(ConfigError, match=f"got slot {slot}"):
            held.put(0, slot, block(held, 0))
    held.put(0, 0, block(held, 0))
    held.close()
    assert held._stored == {}


def test_no_slots_at_all_take_no_room(folder: Path | None) -> None:
    held = store(folder=folder, slots=[0, 0])
    assert held.nbytes == 0
    held.close()


@pytest.mark.parametrize("slots", [[1], [1, -1], []])
def test_counts_that_make_no_sense_are_refused(slots: list[int]) -> None:
    with pytest.raises(ConfigError, match="host_slots must be 2 counts of at least 0, one per layer group"):
        store(slots=slots)


def test_the_file_has_no_name_and_leaves_nothing_behind(tmp_path: Path) -> None:
    held = store(folder=tmp_path)
    held.put(0, 0, block(held, 0))
    assert list(tmp_path.iterdir()) == []  # a crash could leave nothing
    file = held._storage._file.fileno()
    held.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_hold_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file", Path("/proc")):
        with pytest.raises(
            ConfigError, match=rf"can't keep swapped blocks in {path}: .*; name a folder that"
        ):
            store(folder=path)


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(host_store.tempfile, "TemporaryFile", read_only)
    with pytest.raises(ConfigError, match="Read-only file system; name a folder that can be written to"):
        store(folder=tmp_path)


@pytest.fixture(params=["posix_fallocate", "by writing"])
def how_reserved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to take room on a disk; macOS has the second only."""
    if request.param == "by writing":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)


@pytest.mark.usefixtures("how_reserved")
def test_a_full_disk_is_refused_at_once_and_nothing_is_left(tmp_path: Path) -> None:
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(
            OutOfMemory, match=r"host store needs \d+\.\d+ KiB in .*: .*; use fewer host slots"
        ):
            store(folder=tmp_path, slots=[100, 3])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    if open_files is not None:
        assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.usefixtures("how_reserved")
def test_room_is_taken_either_way(tmp_path: Path) -> None:
    held = store(folder=tmp_path, slots=[1000, 3])  # more than one piece
    assert os.fstat(held._storage._file.fileno()).st_size == held.nbytes > 1 << 20
    held.put(1, 2, block(held, 1))
    assert held.get(1, 2) is not None
    held.close()


def test_too_little_memory_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _: 1000)
    message = (
        r"the host store needs \d+\.\d+ KiB on cpu, but 1,000 B is free; use fewer host slots, or swap to"
    )
    with pytest.raises(OutOfMemory, match=message):
        store()


def test_a_disk_that_fails_later_makes_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    held = store(folder=tmp_path)
    held.put(0, 0, block(held, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        assert held.get(0, 0) is None
    assert held.get(0, 0) is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        held.put(0, 0, block(held, 0, 1))  # the old block is gone, the new one did not arrive
    assert held.get(0, 0) is None
    assert "can't be read: Input/output error" in caplog.text
    assert "is lost: Input/output error" in caplog.text
    held.close()


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: read(file, [parts[0][:11]], at))
    held = store(folder=tmp_path)
    held.put(0, 1, block(held, 0))
    got = held.get(0, 1)
    assert got is not None
    assert torch.equal(got, block(held, 0))
    held.close()
