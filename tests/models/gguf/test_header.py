"""Headers of GGUF files: every value is read; whatever is damaged or foreign is refused, with its place."""

import contextlib
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import ModelError
from kvq.models.gguf.header import read_gguf_header
from tests.models.gguf.kit import Stored, pack, text

META: dict[str, Any] = {"general.architecture": "llama", "a.count": 7, "a.list": ["x", "yz"]}
ROW = Stored(8, (2, 64), bytes(4 * 34))  # Q8_0
VECTOR = Stored(0, (3,), struct.pack("<3f", 1, 2, 3))
TENSORS = {"blk.0.attn_q.weight": ROW, "output_norm.weight": VECTOR}
GOOD = pack(META, TENSORS)


def read(tmp_path: Path, raw: bytes) -> Any:
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    return read_gguf_header(path)


def head(*, keys: bytes = b"", num_keys: int = 0, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    raw = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_keys) + keys + tensors
    return raw + bytes(-len(raw) % 32)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(
    name: bytes = b"t",
    *,
    dims: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int = 0,
    count: int | None = None,
) -> bytes:
    count = len(dims) if count is None else count
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def test_names_shapes_and_places(tmp_path):
    metadata, (row, vector) = read(tmp_path, GOOD)
    assert metadata == META
    assert (row.name, row.dtype, row.shape, row.end - row.begin) == (
        "blk.0.attn_q.weight",
        "Q8_0",
        (2, 64),
        136,
    )
    assert (vector.dtype, vector.shape) == ("F32", (3,))
    assert vector.begin % 32 == 0
    assert vector.path.read_bytes()[vector.begin : vector.end] == VECTOR.data


@pytest.mark.parametrize(
    ("kind", "code", "value"),
    [
        *((0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -300), (4, "I", 1 << 31), (5, "i", -70000)),
        *((6, "f", 0.5), (7, "?", True), (10, "Q", 1 << 63), (11, "q", -(1 << 62)), (12, "d", 0.1)),
    ],
)
def test_every_type_of_value(tmp_path, kind, code, value):
    one, many = struct.pack(f"<{code}", value), struct.pack(f"<IQ2{code}", kind, 2, value, value)
    found = read(tmp_path, head(keys=key(b"one", kind, one) + key(b"many", 9, many), num_keys=2))[0]
    assert found == {"one": value, "many": [value, value]}
    assert type(found["one"]) is type(value)


def test_arrays_in_arrays_and_bytes_that_are_no_text(tmp_path):
    inner = struct.pack("<IQ", 8, 1) + text(b"\xff\x00")
    found = read(tmp_path, head(keys=key(b"k", 9, struct.pack("<IQ", 9, 2) + inner * 2), num_keys=1))[0]
    assert [one[0].encode("utf-8", "surrogateescape") for one in found["k"]] == [b"\xff\x00"] * 2


def test_another_alignment(tmp_path):
    found = read(tmp_path, pack(META | {"general.alignment": 64}, TENSORS))
    assert [one.begin % 64 for one in found[1]] == [0, 0]


DEEP = struct.pack("<IQ", 9, 1) * 5 + struct.pack("<IQ", 4, 0)
BAD = {
    "no GGUF file: it begins with b'PK": (b"PK\x03\x04" + bytes(60)),
    "big-endian": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0),
    "has version 1 of GGUF": struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
    "has version 9 of GGUF": struct.pack("<4sIQQ", b"GGUF", 9, 0, 0),
    "it has 5 bytes": b"GGUF\x03",
    "claims 1152921504606846976 keys": head(num_keys=1 << 60),
    "claims 1152921504606846976 tensors": head(num_tensors=1 << 60),
    "a string of 4294967296 bytes": head(keys=struct.pack("<Q", 1 << 32) + bytes(40), num_keys=1),
    "is not UTF-8": head(keys=key(b"\xff\xfe", 4, bytes(4)), num_keys=1),
    "the key 'k' occurs twice": head(keys=key(b"k", 4, bytes(4)) * 2, num_keys=2),
    "values of type 13": head(keys=key(b"k", 13, bytes(8)), num_keys=1),
    "values of type 77": head(keys=key(b"k", 9, struct.pack("<IQ", 77, 0)), num_keys=1),
    "claims 1099511627776 values": head(keys=key(b"k", 9, struct.pack("<IQ", 4, 1 << 40)), num_keys=1),
    "claims 1099511627776 values of 8": head(keys=key(b"k", 9, struct.pack("<IQ", 8, 1 << 40)), num_keys=1),
    "more than 4 deep": head(keys=key(b"k", 9, DEEP), num_keys=1),
    "power of two, got 24": pack(META | {"general.alignment": 24}, {}),
    "power of two, got 'x'": head(keys=key(b"general.alignment", 8, text("x")), num_keys=1),
    "tensor 'u' overlaps tensor 't'": head(
        tensors=tensor() + tensor(b"u", offset=96), num_tensors=2
    ) + bytes(256),
    "begins at 4, which is no multiple of 32": head(tensors=tensor(offset=4), num_tensors=1) + bytes(256),
    "ends at byte 192, so 28 bytes are missing": head(tensors=tensor(), num_tensors=1) + bytes(100),
    "has 0 dimensions": head(tensors=tensor(dims=()), num_tensors=1) + bytes(64),
    "has 5 dimensions": head(tensors=tensor(dims=(2,) * 5), num_tensors=1) + bytes(128),
    "is empty or too large": head(tensors=tensor(dims=(32, 0)), num_tensors=1) + bytes(64),
    "of shape [4611686018427387904, 32] is empty or too large": head(
        tensors=tensor(dims=(32, 1 << 62)), num_tensors=1
    ),
    "rows of 31 values, and blocks of Q4_0 have 32": head(tensors=tensor(dims=(31,), kind=2), num_tensors=1),
    "stored as IQ2_XXS": head(tensors=tensor(kind=16), num_tensors=1),
    "stored as type number 99": head(tensors=tensor(kind=99), num_tensors=1),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_damaged_and_foreign_files(tmp_path, message):
    with pytest.raises(ModelError) as caught:
        read(tmp_path, BAD[message])
    assert message in str(caught.value)
    assert str(tmp_path / "a.gguf") in str(caught.value)


def test_every_beginning_of_a_file_is_refused(tmp_path):
    for length in range(len(GOOD)):
        with pytest.raises(ModelError):
            read(tmp_path, GOOD[:length])


def test_flipped_bytes_are_read_or_refused(tmp_path):
    generator, start = random.Random(0), time.monotonic()
    for _ in range(1500):
        raw = bytearray(GOOD)
        for _ in range(generator.choice((1, 1, 2, 8))):
            raw[generator.randrange(len(raw))] = generator.choice(
                (0, 1, 8, 9, 127, 255, generator.randrange(256))
            )
        with contextlib.suppress(ModelError):
            read(tmp_path, bytes(raw))
    assert time.monotonic() - start < 30


def test_a_large_vocabulary_is_read_quickly(tmp_path):
    tokens = struct.pack("<IQ", 8, 1 << 18) + b"".join(text(f"token{i}") for i in range(1 << 18))
    raw = head(keys=key(b"tokenizer.ggml.tokens", 9, tokens), num_keys=1)
    start = time.perf_counter()
    found = read(tmp_path, raw)[0]["tokenizer.ggml.tokens"]
    assert time.perf_counter() - start < 3  # 0.1 s alone
    assert (len(found), found[-1]) == (1 << 18, "token262143")


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ModelError, match=r"can't read .*No such file"):
        read_gguf_header(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="can't read"):
        read_gguf_header(tmp_path)
