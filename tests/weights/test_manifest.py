"""The manifest finds every flipped bit, of the files and of itself."""

import json
from pathlib import Path

import pytest
import torch

from kvq.errors import ModelError
from kvq.weights.manifest import (
    MANIFEST,
    find_faults,
    manifest_bytes,
    read_manifest,
    relist,
    verify_manifest,
    write_manifest,
)
from kvq.weights.writer import CheckpointWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.add({"a": torch.arange(7.0)})
        writer.finish({"model_type": "llama"}, texts={"kvq.json": "{}"})
    return tmp_path / "model"


def test_the_manifest_of_known_files_is_known() -> None:
    """The xxh3_128 of no bytes is 99aa06d3014798d86001c324468d497f."""
    content = manifest_bytes({"a": (0, "99aa06d3014798d86001c324468d497f")})
    assert json.loads(content)["files"] == {"a": {"bytes": 0, "xxh3": "99aa06d3014798d86001c324468d497f"}}
    assert json.loads(content)["format_version"] == 1


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
def test_every_flipped_bit_is_found_and_its_file_named(folder: Path, step: int) -> None:
    for path in folder.iterdir():
        whole = path.read_bytes()
        for bit in range(0, len(whole) * 8, step):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises(ModelError, match=path.name):
                verify_manifest(folder)
        path.write_bytes(whole)
    assert verify_manifest(folder)


def test_missing_longer_and_added_files(folder: Path) -> None:
    (folder / "README.md").write_text("added later")
    (folder / ".gitattributes").write_text("added later")
    assert verify_manifest(folder)
    (folder / "other.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"other\.safetensors is not listed"):
        verify_manifest(folder)
    (folder / "other.safetensors").unlink()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json is damaged: bytes: 2, but .* says"):
        verify_manifest(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is damaged: missing"):
        verify_manifest(folder)


def test_a_folder_without_one_says_so(tmp_path: Path) -> None:
    assert verify_manifest(tmp_path) is False
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "files: it lists none"),
        (b'{"files": {}, "format_version": 2}', "format_version: this kvq reads 1, got 2"),
        (b'{"files": {}, "format_version": true}', "format_version: this kvq reads 1, got True"),
        (b'{"files": {"../a": {}}, "format_version": 1}', "is no file of this folder"),
        (b'{"files": {"a": {}}, "format_version": 1}', "must have the fields bytes and xxh3"),
        (b'{"files": {"a": {"bytes": -1, "xxh3": ""}}, "format_version": 1}', "bytes or xxh3"),
        (
            b'{"files": {"a": {"bytes": 1e400, "xxh3": ""}}, "format_version": 1}',
            "files.a.bytes: numbers must be finite",
        ),
        (b'{"files": {}, "format_version": 1}', "digest: its bytes are not the ones"),
        (manifest_bytes({}) + b"\n", "digest: its bytes are not the ones"),
    ],
)
def test_what_kvq_did_not_write_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        verify_manifest(tmp_path)
    assert MANIFEST in str(caught.value)


def test_a_manifest_of_others_files_is_the_one_their_writer_would_have_made(folder: Path) -> None:
    written = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).unlink()
    (folder / "README.md").write_text("not read by loaders")
    (folder / ".hidden.json").write_text("{}")
    heard: list[int] = []
    assert set(write_manifest(folder, heard.append)) == {"config.json", "kvq.json", "model.safetensors"}
    assert (folder / MANIFEST).read_bytes() == written
    assert sum(heard) == sum((folder / name).stat().st_size for name in read_manifest(folder) or {})


def test_all_files_that_differ_are_told(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "kvq.json").unlink()
    said = [str(fault) for fault in find_faults(folder, read_manifest(folder) or {})]
    assert [text.split(" is damaged: ")[0] for text in said] == [
        str(folder / "config.json"),
        str(folder / "kvq.json"),
    ]
    assert all(f"kvq manifest {folder} --overwrite" in text for text in said)


def test_a_recipe_that_kvq_writes_later_is_listed_and_other_files_are_not(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("kvq.json", "other.json"):
        (folder / name).write_text("{ }")
        relist(folder / name)
    assert verify_manifest(folder)
    assert "other.json" not in (read_manifest(folder) or {})
    relist(tmp_path / "kvq.json")  # beside no manifest
    assert not (tmp_path / MANIFEST).exists()
