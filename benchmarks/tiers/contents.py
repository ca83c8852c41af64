"""Blocks with known bytes: any process can tell whether a block that it reads is the one that was written."""

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvq.tiers.disk import DiskTier
from kvq.tiers.folder import Folder
from kvq.tiers.sealing import Sealing, keyed_sealing

FACTS = {"model": "m" * 64, "kv": "int8", "recipe": "r" * 32}
OWNERS = ("tone", "ttwo", "sthree")
_SECONDS = 60.0


class Made:
    """Numbered blocks: owner, name and layer group follow from the number, bytes from number and name."""

    def __init__(self, sealing: Sealing, nbytes: tuple[int, int]) -> None:
        """`nbytes`: least and most bytes of a block."""
        self._sealing, self._nbytes = sealing, nbytes

    def block(self, number: int) -> tuple[str, bytes, int]:
        """Return owner, name and layer group."""
        owner, group = OWNERS[number % len(OWNERS)], number % 2
        return owner, self._sealing.name(owner, sha256(number.to_bytes(8, "little")).digest(), group), group

    def content(self, number: int) -> bytes:
        """Return the block's bytes."""
        rng = random.Random(number)
        return rng.randbytes(rng.randint(*self._nbytes))


def sealing_of(key: Path | None) -> Sealing:
    """Return the sealing with a key file, or without one."""
    return Sealing() if key is None else keyed_sealing(key)


def make_key(folder: Path) -> Path:
    """Write a key that only its owner can read."""
    path = folder / "key"
    path.touch(mode=0o600)
    path.write_text("5f" * 32, encoding="utf-8")
    return path


@contextmanager
def a_tier(folder: Path, budget: int, sealing: Sealing, most_bytes: int, **more: Any) -> Iterator[DiskTier]:
    """Open the tier over a folder, as an engine opens it, and close it."""
    tier = DiskTier(Folder(folder, budget, most_bytes), sealing, FACTS, **more)
    try:
        yield tier
    finally:
        tier.close()


def read_all(tier: DiskTier, made: Made, numbers: Iterable[int]) -> dict[str, list[int]]:
    """Read blocks and return their numbers by outcome: right, missing, wrong."""
    numbers = list(numbers)
    coming: Future[list[Any]] = tier.read([made.block(number) for number in numbers])
    found: dict[str, list[int]] = {"right": [], "missing": [], "wrong": []}
    for number, read in zip(numbers, coming.result(_SECONDS), strict=True):
        content = None if read is None else read[0]
        is_right = content is not None and bytes(memoryview(content)) == made.content(number)
        found["missing" if content is None else "right" if is_right else "wrong"].append(number)
    return found


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files, each as long as it is now."""
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # deleted meanwhile
            continue
    return total
