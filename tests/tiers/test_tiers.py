"""Host memory and what is below it: budgets, quotas, ages, and the order in which blocks leave."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvq.tiers.disk import DiskTier
from kvq.tiers.folder import Folder
from kvq.tiers.sealing import Sealing
from kvq.tiers.tiers import OWN_FORM, BlockKey, Tiers

SIZE = 1000


def key(number: int, root: bytes = b"r") -> BlockKey:
    return BlockKey(root, number.to_bytes(32, "big"), 0)


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


def tiers(blocks: int, disk: DiskTier | None = None, **options: Any) -> Tiers:
    return Tiers(blocks * SIZE, disk, **options)


def put(some: Tiers, *numbers: int, root: bytes = b"r") -> None:
    for number in numbers:
        if some.wants(key(number, root)):
            some.put(key(number, root), content(number))


def held(some: Tiers, *numbers: int) -> list[int]:
    return [number for number in numbers if some.find(key(number)) is not None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    made = DiskTier(Folder(tmp_path, 8 << 20, SIZE), Sealing(), {})
    yield made
    made.close()


def test_the_least_recently_used_blocks_leave() -> None:
    some = tiers(4)
    put(some, 1, 2, 3, 4, 1, 5, 6)
    assert held(some, *range(8)) == [1, 4, 5, 6]
    assert some.nbytes == 4 * SIZE
    assert some.num_dropped == 2


def test_blocks_that_went_back_to_a_pool_leave_first_and_their_depth_decides() -> None:
    some = tiers(4)
    put(some, 4, 3, 2, 1)  # a pool evicts the deepest block first
    fetch = some.fetch([key(1), key(2)])
    assert fetch.is_done
    assert [fetch.take(i) for i in range(2)] == [(content(i), OWN_FORM) for i in (1, 2)]
    put(some, 5)
    assert held(some, 1, 2, 3, 4, 5) == [1, 3, 4, 5]
    put(some, 1, 6)
    assert held(some, 1, 2, 3, 4, 5, 6) == [1, 3, 5, 6]


def test_a_tenant_keeps_to_its_share() -> None:
    some = tiers(10, tenant_share=0.4)
    some.learn(b"r", "a")
    some.learn(b"other", "b")
    put(some, 100, 101, root=b"other")
    put(some, *range(9))
    assert held(some, *range(9)) == [5, 6, 7, 8]
    assert some.find(key(100, b"other"))


def test_unused_blocks_are_dropped_by_age() -> None:
    now = [0.0]
    some = tiers(4, max_age_s=10.0, clock=lambda: now[0])
    aged: list[BlockKey] = []
    some.on_aged = aged.append
    put(some, 1, 2)
    now[0] = 9.0
    put(some, 1)
    now[0] = 12.0
    some.expire()
    assert held(some, 1, 2) == [1]
    assert aged == [key(2)]


def test_no_block_outlives_its_age_whatever_was_used_since() -> None:
    now = [0.0]
    some = tiers(9, max_age_s=10.0, clock=lambda: now[0])
    aged: list[BlockKey] = []
    some.on_aged = aged.append
    put(some, 0, 1, 2, 3)
    now[0] = 9.0
    put(some, 3)
    some.fetch([key(3)])  # now it is the first to leave
    now[0] = 15.0
    assert held(some, 0, 1, 2, 3) == [3], "at once"
    assert aged == [key(0), key(1), key(2)]
    some.expire()
    assert (len(some), some.nbytes) == (1, SIZE)
    now[0] = 19.5
    some.expire()
    assert len(some) == 0


def test_an_old_block_does_not_go_to_the_disk_and_a_miss_there_is_told(tmp_path: Path) -> None:
    now = [1e9]
    folder = Folder(tmp_path, 8 << 20, SIZE, max_age_s=10.0, clock=lambda: now[0])
    disk = DiskTier(folder, Sealing(), {})
    some = tiers(1, disk, max_age_s=10.0, clock=lambda: now[0])
    aged: list[BlockKey] = []
    some.on_aged = aged.append
    put(some, 1)
    now[0] += 6
    put(some, 2)
    assert held(some, 1, 2) == [1, 2]
    disk.refresh()  # now it is written
    now[0] += 5
    assert held(some, 1, 2) == [2], "six seconds in host memory and five on the disk"
    assert aged == [key(1)]
    now[0] += 6
    put(some, 3)
    assert held(some, 2) == []
    assert aged[1:] == [key(2)]
    some.close()
    assert disk.counts.written == 2, "the first and the last"


def test_a_flipped_bit_in_host_memory_is_a_miss() -> None:
    some, changed = tiers(4), bytearray(content(1))
    some.put(key(1), changed)
    changed[17] ^= 4
    fetch = some.fetch([key(1)])
    assert fetch.take(0) is None
    assert not some.find(key(1))
    assert some.num_damaged == 1


def test_what_leaves_host_memory_goes_to_the_disk_and_comes_back(disk: DiskTier) -> None:
    some = tiers(2, disk)
    put(some, 1, 2, 3, 4)
    assert held(some, *range(6)) == [1, 2, 3, 4]
    fetch = some.fetch([key(1), key(4), key(9)])
    while not fetch.is_done:
        pass
    assert [fetch.take(i) for i in range(3)] == [(content(1), OWN_FORM), (content(4), OWN_FORM), None]
    assert [fetch.is_from_disk(i) for i in range(3)] == [True, False, True]
    some.close()
    assert disk.counts.written == 4, "what host memory still had is written in the end"


def test_a_disk_without_host_memory_takes_each_block_once(disk: DiskTier) -> None:
    some = tiers(0, disk)
    put(some, 1, 2, 1)
    assert not some.wants(key(1))
    assert len(disk) == 2
    assert some.nbytes == 0


def test_without_a_disk_everything_is_saved_as_far_as_it_can_be() -> None:
    some = tiers(1)
    assert some.is_saved(key(1))
    put(some, 1, 2)
    assert held(some, 1, 2) == [2]
