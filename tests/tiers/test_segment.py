"""Segments: what was written is found again, whatever else in the file is damaged."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvq.errors import DamagedData
from kvq.tiers.segment import (
    HEADER_BYTES,
    RECORD_BYTES,
    Record,
    content_digest,
    file_header,
    read_header,
    records,
    tail,
)


def write(path: Path, count: int, *, complete: bool, seed: int = 0) -> list[Record]:
    """A segment with random blocks; returns their records."""
    rng, made = random.Random(seed), []
    with open(path, "wb") as file:
        file.write(file_header({"model": "m", "kv": "int4"}))
        for i in range(count):
            name, content = rng.randbytes(32), rng.randbytes(rng.choice([1, 100, 5000]))
            record = Record(
                name,
                i % 3,
                rng.randbytes(16),
                1.5 * i,
                len(content),
                content_digest(name, i % 3, content),
                False,
            )
            file.write(record.pack())
            made.append(replace(record, offset=file.tell()))
            file.write(content)
        if complete:
            file.write(tail(made))
    return made


def found(path: Path, start: int = HEADER_BYTES, *, is_open: bool = False) -> list[Record | None]:
    return list(records(path, start, is_open=is_open))


def is_intact(path: Path, record: Record) -> bool:
    with open(path, "rb") as file:
        content = os.pread(file.fileno(), record.nbytes, record.offset)
    return content_digest(record.name, record.group, content) == record.digest


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_records_are_found_again(tmp_path: Path, count: int, complete: bool) -> None:
    made = write(tmp_path / "s", count, complete=complete)
    assert found(tmp_path / "s") == made
    assert all(is_intact(tmp_path / "s", record) for record in made)
    if made:
        assert found(tmp_path / "s", made[0].end) == made[1:]
        assert found(tmp_path / "s", made[-1].end) == []
    with open(tmp_path / "s", "rb") as file:
        assert read_header(file.fileno()) == {"version": 1, "model": "m", "kv": "int4"}


def test_a_file_that_ends_anywhere_keeps_what_is_before(tmp_path: Path) -> None:
    made = write(tmp_path / "s", 6, complete=True)
    whole = (tmp_path / "s").read_bytes()
    rng = random.Random(1)
    for size in [HEADER_BYTES, *(rng.randrange(HEADER_BYTES, len(whole)) for _ in range(300))]:
        (tmp_path / "t").write_bytes(whole[:size])
        kept = [record for record in made if record.end <= size]
        torn = kept[-1].end if kept else HEADER_BYTES
        good = [record for record in found(tmp_path / "t", is_open=True) if record is not None]
        assert [record for record in good if is_intact(tmp_path / "t", record)] == kept
        if torn < size < made[-1].end:
            assert None in found(tmp_path / "t"), "the torn part counts once its engine is gone"


@pytest.mark.parametrize("complete", [False, True])
def test_a_flipped_bit_loses_one_block_at_most(tmp_path: Path, complete: bool) -> None:
    made = write(tmp_path / "s", 12, complete=complete)
    whole = bytearray((tmp_path / "s").read_bytes())
    rng = random.Random(2)
    for _ in range(400):
        at, bit = rng.randrange(HEADER_BYTES, len(whole)), 1 << rng.randrange(8)
        whole[at] ^= bit
        (tmp_path / "t").write_bytes(whole)
        whole[at] ^= bit
        good = {r.name: r for r in reversed(found(tmp_path / "t")) if r is not None}
        intact = {name for name, record in good.items() if is_intact(tmp_path / "t", record)}
        assert len(intact) >= len(made) - 1
        assert intact <= {record.name for record in made}


def test_a_flipped_bit_in_a_header_refuses_the_file(tmp_path: Path) -> None:
    write(tmp_path / "s", 1, complete=False)
    whole = bytearray((tmp_path / "s").read_bytes())
    for at in range(0, HEADER_BYTES, 7):
        whole[at] ^= 4
        (tmp_path / "s").write_bytes(whole)
        whole[at] ^= 4
        with open(tmp_path / "s", "rb") as file, pytest.raises(DamagedData):
            read_header(file.fileno())


def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(file_header({"version": "2"}))  # type: ignore[dict-item]
    with open(tmp_path / "s", "rb") as file, pytest.raises(DamagedData, match="version '2'"):
        read_header(file.fileno())


def test_blocks_that_were_exchanged_do_not_match(tmp_path: Path) -> None:
    a, b = b"a" * 32, b"b" * 32
    assert content_digest(a, 0, b"x") != content_digest(b, 0, b"x") != content_digest(b, 1, b"x")
    assert len(Record(a, 0, a[:16], 0.0, 1, a[:16], False).pack()) == RECORD_BYTES
