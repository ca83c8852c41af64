"""Disk tier: budgets, restarts, damage, several engines, and disks that fail."""

import errno
import fcntl
import os
import random
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ConfigError
from kvq.tiers import disk as disk_module
from kvq.tiers.disk import DiskTier
from kvq.tiers.folder import Folder, is_written
from kvq.tiers.sealing import Sealing, keyed_sealing
from kvq.tiers.segment import HEADER_BYTES, SUFFIX

BUDGET = 8 << 20  # eight segments
SIZE = 64 << 10  # of a block


class Kit:
    """Disk tiers over one folder, closed at the end, with a clock that tests put forward."""

    def __init__(self, path: Path) -> None:
        self.path, self.ahead = path, 0.0
        self.open: list[DiskTier] = []

    def tier(
        self,
        budget: int = BUDGET,
        sealing: Sealing | None = None,
        *,
        max_age_s: float | None = None,
        **options: Any,
    ) -> DiskTier:
        clock = lambda: time.time() + self.ahead  # noqa: E731
        folder = Folder(self.path, budget, SIZE, max_age_s=max_age_s, clock=clock)
        made = DiskTier(folder, sealing or Sealing(), {"model": "m"}, **options)
        self.open.append(made)
        return made

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.glob("*" + SUFFIX))


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path / "kv")
    yield made
    for tier in made.open:
        tier.close()


def block(tier: DiskTier, number: int, owner: str = "t") -> tuple[str, bytes, int]:
    return owner, tier.sealing.name(owner, number.to_bytes(32, "little"), number % 2), number % 2


def content(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def settle(tier: DiskTier) -> None:
    """Wait until everything queued is written and looked for."""
    done: Future[Any] = tier._writer.submit(lambda: None)
    done.result(10)
    tier.refresh()


def put(tier: DiskTier, *numbers: int, owner: str = "t") -> None:
    for number in numbers:
        tier.write(block(tier, number, owner), content(number))
    settle(tier)


def held(tier: DiskTier, *numbers: int, owner: str = "t") -> list[int]:
    """The blocks that are read back; each has to be the right one."""
    read = tier.read([block(tier, number, owner) for number in numbers]).result(10)
    for number, got in zip(numbers, read, strict=True):
        assert got is None or (bytes(got[0]), got[1]) == (content(number), (0, 0))
    return [number for number, got in zip(numbers, read, strict=True) if got is not None]


def test_blocks_are_read_back_now_and_after_a_restart(kit: Kit) -> None:
    tier = kit.tier()
    put(tier, *range(40))
    assert held(tier, *range(41)) == list(range(40))
    assert tier.counts.written == 40
    tier.close()
    again = kit.tier()
    assert len(again) == 40
    assert held(again, *range(41)) == list(range(40))
    put(again, 7)
    assert again.counts.written == 0, "it is there already"


def test_a_block_that_waits_to_be_written_can_be_read(kit: Kit) -> None:
    tier, go_on = kit.tier(), threading.Event()
    tier._writer.submit(go_on.wait)
    tier.write(block(tier, 1), content(1))
    assert tier.holds(block(tier, 1)[1])
    assert held(tier, 1) == [1]
    go_on.set()


def test_the_budget_holds_and_the_least_recently_used_go_first(kit: Kit) -> None:
    tier = kit.tier()
    for number in range(400):
        kit.ahead += 20
        put(tier, number)
        assert kit.nbytes <= BUDGET
        assert held(tier, 0) == [0], "it is used all the time"
    kept = held(tier, *range(400))
    assert len(kept) >= BUDGET // SIZE * 0.7
    assert kept[-50:] == list(range(350, 400))
    assert 100 not in kept


def test_several_engines_share_a_folder_and_its_budget(kit: Kit) -> None:
    tiers = [kit.tier(), kit.tier(), kit.tier()]
    rng = random.Random(3)
    for number in range(300):
        put(tiers[number % 3], number)
        assert kit.nbytes <= BUDGET
        if number % 10 == 0:
            for tier in tiers:
                settle(tier)
            recent = list(range(max(0, number - 20), number + 1))
            assert held(rng.choice(tiers), *recent) == recent


def test_a_tenant_has_its_share_and_loses_its_oldest(kit: Kit) -> None:
    tier = kit.tier(tenant_share=0.25)
    put(tier, *range(200, 210), owner="b")
    put(tier, *range(100), owner="a")
    kept = held(tier, *range(100), owner="a")
    assert kept == list(range(100 - len(kept), 100))
    assert 0.2 * BUDGET / SIZE < len(kept) <= 0.25 * BUDGET / SIZE
    assert held(tier, *range(200, 210), owner="b") == list(range(200, 210))
    tier.close()
    assert len(held(kit.tier(tenant_share=0.25), *range(100), owner="a")) == len(kept)


def test_unused_segments_are_dropped_by_age(kit: Kit) -> None:
    tier = kit.tier(max_age_s=100.0)
    put(tier, *range(20))
    tier.close()
    again = kit.tier(max_age_s=100.0)
    kit.ahead += 90
    settle(again)
    assert held(again, 1) == [1]
    kit.ahead += 150
    settle(again)
    assert held(again, *range(16, 20)) == []
    put(again, 50)
    assert kit.nbytes < 2 * SIZE, "old segments are deleted when one is created"


def test_every_flipped_bit_is_a_miss(kit: Kit) -> None:
    tier = kit.tier()
    put(tier, *range(15))
    tier.close()
    (path,) = kit.path.glob("*" + SUFFIX)
    whole, rng = bytearray(path.read_bytes()), random.Random(5)
    for _ in range(60):
        at, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        whole[at] ^= bit
        path.write_bytes(whole)
        whole[at] ^= bit
        damaged = kit.tier()
        kept = held(damaged, *range(15))  # checks every content
        assert len(kept) == 0 if at < HEADER_BYTES else len(kept) >= 14
        assert damaged.counts.damaged == (len(kept) < 15) or at > len(whole) - 16 * 92
        damaged.close()


def test_a_segment_that_was_cut_short_counts_as_damaged_once(kit: Kit) -> None:
    tier = kit.tier()
    put(tier, *range(5))
    tier.close()
    (path,) = kit.path.glob("*" + SUFFIX)
    os.truncate(path, HEADER_BYTES + 3 * SIZE)
    again = kit.tier()
    for _ in range(3):
        settle(again)
    assert held(again, *range(5)) == [0, 1]
    assert again.counts.damaged == 1


def test_a_segment_that_was_deleted_is_a_miss(kit: Kit) -> None:
    tier = kit.tier()
    put(tier, *range(30))
    for path in kit.path.glob("*" + SUFFIX):
        path.unlink()
    assert held(tier, *range(30)) == []
    settle(tier)
    assert len(tier) == 0


def test_a_full_disk_loses_nothing_that_was_written_and_is_tried_again(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = kit.tier()
    put(tier, *range(5))
    real, left = os.pwrite, [SIZE // 2]

    def pwrite(file: int, data: Any, offset: int) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(file, memoryview(data)[: left[0]], offset)
        left[0] -= done
        return done

    monkeypatch.setattr(disk_module.os, "pwrite", pwrite)
    put(tier, 5, 6)
    assert tier.is_failing
    assert held(tier, *range(7)) == list(range(5))
    assert tier.counts.dropped == 2
    monkeypatch.undo()
    put(tier, 7)
    assert held(tier, 7) == [], "not tried again yet"
    kit.ahead += 61
    put(tier, 8)
    assert held(tier, *range(9)) == [0, 1, 2, 3, 4, 8]
    tier.close()
    again = kit.tier()
    assert held(again, *range(9)) == [0, 1, 2, 3, 4, 8]
    assert again.counts.damaged == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_became_read_only_is_still_read(kit: Kit) -> None:
    tier = kit.tier()
    put(tier, *range(3))
    tier.close()
    os.chmod(kit.path, 0o500)
    try:
        again = kit.tier()
        put(again, 4)
        assert held(again, *range(5)) == [0, 1, 2]
        assert again.is_failing
    finally:
        os.chmod(kit.path, 0o700)


def test_a_folder_that_cannot_be_written_is_still_read(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = kit.tier()
    put(tier, *range(3))
    tier.close()

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    again = kit.tier()
    monkeypatch.setattr(Folder, "create", refuse)
    put(again, 4)
    assert held(again, *range(5)) == [0, 1, 2]
    assert again.is_failing


def test_with_a_key_blocks_are_encrypted_and_other_keys_find_nothing(kit: Kit, tmp_path: Path) -> None:
    keys = []
    for name in "ab":
        path = tmp_path / name
        path.write_text(name * 32)
        path.chmod(0o600)
        keys.append(keyed_sealing(path))
    tier = kit.tier(sealing=keys[0])
    put(tier, *range(5))
    tier.close()
    stored = b"".join(path.read_bytes() for path in kit.path.glob("*" + SUFFIX))
    assert not any(content(number)[:100] in stored for number in range(5))
    assert held(kit.tier(sealing=keys[0]), *range(5)) == list(range(5))
    other = kit.tier(sealing=keys[1])
    assert held(other, *range(5)) == []
    for number in range(5):  # even under the right name
        owner, _, group = block(other, number)
        _, name, _ = block(tier, number)
        assert other.read([(owner, name, group)]).result(10) == [None]
    assert other.counts.damaged == 5


def test_names_tell_owners_groups_and_keys_apart(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("k" * 32)
    path.chmod(0o600)
    keyed, plain = keyed_sealing(path), Sealing()
    digest = b"d" * 32
    assert keyed.name("a", digest, 0) != keyed.name("b", digest, 0)
    assert keyed.owner_tag("a") != plain.owner_tag("a")
    for sealing in (keyed, plain):
        assert sealing.name("a", digest, 0) != sealing.name("a", digest, 1)
        assert len(sealing.name("a", digest, 0)) == 32


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("k" * 32)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        keyed_sealing(path)


def test_budgets_and_folders_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 2\.00 MiB"):
        Folder(tmp_path / "kv", 1 << 20, SIZE)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't keep KV in"):
        Folder(tmp_path / "file", BUDGET)


def test_a_segment_is_written_while_its_engine_holds_it(kit: Kit) -> None:
    tier = kit.tier()
    put(tier, 1)
    (path,) = kit.path.glob("*" + SUFFIX)
    assert is_written(path)
    tier.close()
    assert not is_written(path)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_the_queue_is_bounded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_QUEUED_BYTES", 3 * SIZE)
    tier, go_on = kit.tier(), threading.Event()
    tier._writer.submit(go_on.wait)
    for number in range(5):
        tier.write(block(tier, number), content(number))
    assert not tier.has_room
    assert tier.counts.dropped == 2
    go_on.set()
    settle(tier)
    assert held(tier, *range(5)) == [0, 1, 2]
    assert tier.has_room


def found(tier: DiskTier, *numbers: int) -> list[int]:
    return [number for number in numbers if tier.find(block(tier, number)[1]) is not None]


def files(kit: Kit) -> list[Path]:
    return sorted(kit.path.glob("*" + SUFFIX))


def test_each_block_is_found_as_long_as_it_is_used_and_no_longer(kit: Kit) -> None:
    tier = kit.tier(max_age_s=100.0)
    put(tier, 1, 2)
    kit.ahead += 90
    assert held(tier, 2) == [2]
    kit.ahead += 20
    assert found(tier, 1, 2) == [2], "at once, without another look at the folder"
    assert tier.has_aged(block(tier, 1)[1])
    tier.refresh()
    assert tier.nbytes == SIZE
    assert tier.has_aged(block(tier, 1)[1])
    put(tier, 1)
    assert held(tier, 1, 2) == [1, 2], "a block that was too old can be written again"
    assert tier.counts.written == 3


def test_old_blocks_leave_the_disk_although_nothing_is_put(kit: Kit) -> None:
    tier = kit.tier(max_age_s=100.0)
    put(tier, *range(3))
    kit.ahead += 20
    tier.refresh()
    assert [is_written(path) for path in files(kit)] == [False], "later blocks go elsewhere"
    put(tier, 3)
    assert len(files(kit)) == 2
    kit.ahead += 85
    tier.refresh()
    assert len(files(kit)) == 1
    kit.ahead += 30
    tier.refresh()
    assert files(kit) == []
    assert (tier.nbytes, len(tier)) == (0, 0)


def test_old_files_are_deleted_at_the_start(kit: Kit) -> None:
    tier = kit.tier(max_age_s=100.0)
    put(tier, 1)
    tier.close()
    kit.ahead += 110
    kit.tier(max_age_s=100.0)
    assert files(kit) == []


def test_the_time_in_host_memory_counts(kit: Kit) -> None:
    tier = kit.tier(max_age_s=100.0)
    tier.write(block(tier, 1), content(1), (0, 0), 60.0)
    tier.write(block(tier, 2), content(2), (0, 0), 110.0)
    assert found(tier, 1, 2) == [1]
    settle(tier)
    assert (found(tier, 1, 2), tier.counts.written, tier.counts.dropped) == ([1], 1, 1)
    kit.ahead += 50
    tier.refresh()
    assert found(tier, 1) == []


def test_a_running_engine_finds_what_others_write(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_REFRESH_S", 0.01)
    monkeypatch.setattr(disk_module, "_REFRESH_SHARE", 1.0)
    one, other = kit.tier(), kit.tier()
    put(one, *range(5))
    until = time.monotonic() + 10
    while found(other, *range(5)) != list(range(5)) and time.monotonic() < until:
        time.sleep(0.005)
    assert held(other, *range(5)) == list(range(5))


def test_a_look_takes_a_small_share_of_the_time(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = kit.tier()
    assert 1.0 <= tier.refresh() <= 30.0
    ticks = iter([0.0, 0.0005])
    monkeypatch.setattr(disk_module.time, "perf_counter", lambda: next(ticks))
    assert tier._refresh() == pytest.approx(5.0)


def test_a_tier_that_was_not_closed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_REFRESH_S", 0.01)
    tier = DiskTier(Folder(tmp_path, BUDGET, SIZE), Sealing(), {})
    kept = weakref.ref(tier)
    del tier
    until = time.monotonic() + 10
    while kept() is not None and time.monotonic() < until:
        time.sleep(0.005)
    assert kept() is None


def test_a_deleted_folder_is_made_again(kit: Kit) -> None:
    tier = kit.tier()
    put(tier, *range(3))
    shutil.rmtree(kit.path)
    tier.refresh()
    assert kit.path.stat().st_mode & 0o777 == 0o700
    assert (tier.nbytes, len(tier)) == (0, 0)
    put(tier, 1)
    assert (held(tier, 1), tier.is_failing, len(files(kit))) == ([1], False, 1)
    shutil.rmtree(kit.path)
    put(tier, 2)
    assert [path.stat().st_size > SIZE for path in files(kit)] == [True], "not into the deleted segment"
    assert (held(tier, 1, 2), tier.nbytes) == ([2], SIZE)


def test_a_segment_is_indexed_once_while_it_is_begun(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, header, go_on = kit.tier(), threading.Event(), threading.Event()
    real = DiskTier._is_usable

    def is_usable(self: DiskTier, path: Path) -> bool:
        header.wait(0.5)
        usable = real(self, path)
        go_on.wait(0.5)
        return usable

    monkeypatch.setattr(DiskTier, "_is_usable", is_usable)
    write_all = disk_module._write_all

    def write(file: int, parts: list[Any], offset: int) -> None:
        look = threading.Thread(target=tier.refresh)
        look.start()
        write_all(file, parts, offset)
        header.set()
        time.sleep(0.05)

    monkeypatch.setattr(disk_module, "_write_all", write)
    tier.write(block(tier, 1), content(1))
    time.sleep(0.2)
    go_on.set()
    monkeypatch.undo()
    settle(tier)
    assert tier._open is not None
    assert list(tier._segments.values()) == [tier._open[0]]
    assert held(tier, 1) == [1]


def test_what_a_killed_engine_had_just_created_is_removed_at_the_start(kit: Kit) -> None:
    kit.tier().close()
    left, locked = kit.path / "a.new", kit.path / "b.new"
    left.touch()
    kit.tier()
    assert left.exists(), "it may be a new one"
    kit.ahead += 61
    with open(locked, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kit.tier()
    assert (left.exists(), locked.exists()) == (False, True)
