"""Bytes of GGUF files: what the reader reads, and targets that are refused."""

import pytest
import torch

from kvq.errors import ConfigError
from kvq.formats.ggml import GGML_TYPES
from kvq.models.gguf.export.file import GgufWriter, check_gguf_target
from kvq.models.gguf.header import read_gguf_header

METADATA = {
    "general.architecture": "llama", "a.count": 7, "a.negative": -3, "a.number": 0.5, "a.flag": True,
    "a.text": "Größe 🙂", "a.broken": "x\udcff", "a.texts": ["", "b"], "a.kinds": [1, -2, 3],
    "a.scores": [0.25, -1.0], "a.flags": [True, False],
}  # fmt: skip
KINDS = {"one": (GGML_TYPES["F32"], (3,)), "two": (GGML_TYPES["Q8_0"], (2, 32))}
ROWS = torch.arange(68, dtype=torch.uint8).view(2, 34)


def test_metadata_and_tensors_are_read_as_they_were_written(tmp_path):
    out = tmp_path / "a.gguf"
    with GgufWriter(out) as writer:
        writer.begin(METADATA | {"a.text": "GRÖSSE 🙂"}, KINDS)
        writer.begin(METADATA | {"a.count": 8}, KINDS)
        writer.add([torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8)])
        writer.add(iter(ROWS))
        assert not out.exists()
        writer.finish(METADATA)
    metadata, tensors = read_gguf_header(out)
    assert metadata == METADATA
    assert {one.name: (one.kind, one.shape) for one in tensors} == KINDS
    raw = out.read_bytes()
    assert [raw[one.begin : one.end] for one in tensors][1] == ROWS.numpy().tobytes()
    assert all(one.begin % 32 == 0 for one in tensors)
    assert len(raw) % 32 == 0


def test_nothing_is_left_of_an_unfinished_file(tmp_path):
    with GgufWriter(tmp_path / "a.gguf") as writer:
        writer.begin(METADATA, KINDS)
        assert writer.path.is_file()
    assert list(tmp_path.iterdir()) == []


def test_targets(tmp_path):
    (tmp_path / "other.gguf").write_text("no GGUF")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "new.gguf")
    for name, message in (
        ("a.bin", r"ends in \.gguf"),
        ("a-00001-of-00002.gguf", "names one part of a split model"),
        ("none/a.gguf", "there is no folder"),
        ("other.gguf", "something else"),
        ("folder.gguf", "something else"),
        ("link.gguf", "something else"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_gguf_target(tmp_path / name, overwrite=True)
    (tmp_path / "old.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="give --overwrite"):
        check_gguf_target(tmp_path / "old.gguf", overwrite=False)
    check_gguf_target(tmp_path / "old.gguf", overwrite=True)
