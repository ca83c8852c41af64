"""The checker takes the segments that kvq writes, and names every damaged part, with numpy alone."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from kvq.tiers.disk import DiskTier
from kvq.tiers.folder import Folder
from kvq.tiers.sealing import Sealing
from tests.spec.test_check import ALONE, ROOT
from tests.waiting import HANG_S

sys.path.insert(0, str(ROOT / "spec"))
from segments import check_segment
from xxh3 import xxh3_64

from findings import Wrong


def run(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE, str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.fixture
def segment(tmp_path) -> Path:
    """A completed segment of ten blocks of two layer groups."""
    draw = random.Random(1)
    facts = {"model": "m", "kv": "int4", "recipe": "r"}
    tier = DiskTier(Folder(tmp_path / "kv", 1 << 30, 4096), Sealing(), facts)
    for i in range(10):
        tier.write(("tenant", draw.randbytes(32), i % 2), draw.randbytes(1000 + 100 * i))
    tier.close()
    (found,) = (tmp_path / "kv").rglob("*.kvqseg")
    return found


@pytest.mark.parametrize("size", [8, *range(17, 129), 241, 504, 1024, 5000])
def test_the_check_value_is_that_of_xxhash(size):
    data = random.Random(size).randbytes(size)
    assert xxh3_64(data) == xxhash.xxh3_64(data).digest()


def test_a_segment_and_its_folder_are_taken(segment):
    for path in (segment, segment.parent):
        found = run(path)
        assert (found.returncode, found.stderr) == (0, "")
        assert "10 blocks of int4, 14500 bytes, complete" in found.stdout


def test_every_changed_byte_and_every_cut_is_found(segment):
    raw, draw = segment.read_bytes(), random.Random(2)
    places = [*range(0, 512, 7), *(draw.randrange(512, len(raw)) for _ in range(600))]
    for at in places:
        changed = bytearray(raw)
        changed[at] ^= 1 << draw.randrange(8)
        segment.write_bytes(changed)
        with pytest.raises(Wrong):
            check_segment(segment)
    for size in (0, 100, 511, 600, len(raw) // 2, len(raw) - 1):
        segment.write_bytes(raw[:size])
        with pytest.raises(Wrong):
            check_segment(segment)


def test_damaged_parts_are_named_and_the_program_exits_with_1(segment):
    raw = bytearray(segment.read_bytes())
    raw[700] ^= 1
    raw[512] ^= 1
    segment.write_bytes(raw)
    found = run(segment.parent)
    assert found.returncode == 1
    assert "bytes 512.." in found.stderr
    assert "the end lists 10 blocks, and 9 were found" in found.stderr
    raw[512] ^= 1
    segment.write_bytes(raw)
    found = run(segment)
    assert found.returncode == 1
    assert "block 0 of layer group" in found.stderr
    assert "is damaged" in found.stderr


def test_exchanged_blocks_are_found(segment):
    raw = segment.read_bytes()
    second = raw.find(b"kvqB", 600)
    first, other = raw[512:600], raw[second : second + 88]
    assert first[:4] == other[:4] == b"kvqB"
    swapped = raw.replace(raw[700:900], raw[second + 200 : second + 400], 1)
    segment.write_bytes(swapped)
    with pytest.raises(Wrong, match="block 0 of layer group"):
        check_segment(segment)
