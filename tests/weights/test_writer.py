"""A model folder is whole under its name or not there, wherever the disk runs full."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvq.errors import ConfigError
from kvq.weights import writer as writing
from kvq.weights.manifest import MANIFEST, verify_manifest
from kvq.weights.writer import INDEX, CheckpointWriter
from tests.waiting import HANG_S

CONFIG = {"model_type": "llama", "name": "mémoire"}


def tensors(count: int = 5) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.arange(12.0).view(3, 4) + i for i in range(count)}


def write(out: Path, source: Path, **options: Any) -> CheckpointWriter:
    """Five tensors of 48 bytes in shards of two, a tokenizer and a recipe."""
    with CheckpointWriter(out, max_shard_bytes=100, **options) as writer:
        for name, tensor in tensors().items():
            writer.add({name: tensor})
        writer.finish(CONFIG, [source / "tokenizer.json"], {"kvq.json": "{}\n"})
    return writer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def test_shards_and_index_hold_every_tensor(place: Path, source: Path) -> None:
    write(place / "model", source)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    others = ["config.json", "kvq.json", MANIFEST, INDEX, "tokenizer.json"]
    assert sorted(os.listdir(place / "model")) == sorted(names + others)
    assert os.listdir(place) == ["model"]
    index = json.loads((place / "model" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 48
    for name, tensor in tensors().items():
        assert torch.equal(load_file(place / "model" / index["weight_map"][name])[name], tensor)
    assert json.loads((place / "model" / "config.json").read_text(encoding="utf-8")) == CONFIG
    assert verify_manifest(place / "model")


def test_one_shard_has_no_index_and_replaces_an_empty_folder(place: Path) -> None:
    (place / "model").mkdir()
    with CheckpointWriter(place / "model") as writer:
        writer.add(tensors())
        assert writer.finish(CONFIG) == place / "model"
    assert sorted(os.listdir(place / "model")) == ["config.json", MANIFEST, "model.safetensors"]
    assert list(load_file(place / "model" / "model.safetensors")) == list(tensors())


def test_tensors_that_share_memory_are_written_each(place: Path) -> None:
    shared = torch.arange(8.0)
    with CheckpointWriter(place / "model") as writer:
        writer.add({"a": shared, "b": shared, "c": shared[4:], "d": shared.view(2, 4).T})
        writer.finish(CONFIG)
    found = load_file(place / "model" / "model.safetensors")
    assert torch.equal(found["a"], found["b"])
    assert torch.equal(found["c"], shared[4:])
    assert torch.equal(found["d"], shared.view(2, 4).T)


def test_only_a_folder_that_kvq_wrote_is_replaced(place: Path, source: Path) -> None:
    out = place / "model"
    write(out, source)
    with pytest.raises(ConfigError, match="it is not empty; name a new folder, or give --overwrite"):
        CheckpointWriter(out)
    (out / "README.md").write_text("later")
    write(out, source, overwrite=True)
    assert not (out / "README.md").exists()
    (out / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="kvq didn't write it"):
        CheckpointWriter(out, overwrite=True)
    (place / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file or a link"):
        CheckpointWriter(place / "file", overwrite=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        CheckpointWriter(place / "no" / "model")
    assert sorted(os.listdir(place)) == ["file", "model"]


def test_names_that_are_taken_are_refused_and_nothing_stays(place: Path, source: Path) -> None:
    (source / "config.json").write_text("{}")
    (source / "old.safetensors").write_text("")
    for path in (source / "config.json", source / "old.safetensors"):
        with CheckpointWriter(place / "model") as writer:
            writer.add(tensors())
            with pytest.raises(ConfigError, match="is taken, or is no file name"):
                writer.finish(CONFIG, [path])
    with (
        CheckpointWriter(place / "model") as writer,
        pytest.raises(ConfigError, match="would hold no tensors"),
    ):
        writer.finish(CONFIG)
    with CheckpointWriter(place / "model") as writer:
        writer.add(tensors(1))
        with pytest.raises(ConfigError, match="was added twice"):
            writer.add(tensors(1))
        with pytest.raises(ConfigError, match="finished or given up"):
            writer.add(tensors(1))
    assert os.listdir(place) == []


def test_leaving_the_block_leaves_nothing(place: Path) -> None:
    def interrupted() -> None:
        with CheckpointWriter(place / "model", max_shard_bytes=50) as writer:
            writer.add(tensors())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(place) == []


class FullDisk:
    """Every call that changes the disk is counted; the one at `position` fails, having done half its work."""

    def __init__(self, position: int) -> None:
        self.position, self.calls = position, 0

    def fails(self) -> bool:
        self.calls += 1
        return self.calls == self.position

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink"):
            patch.setattr(os, name, self.wrapped(getattr(os, name)))
        patch.setattr(writing, "save_file", self.half_written(writing.save_file))
        plain = Path.open

        def opened(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
            file = plain(path, mode, *rest, **options)
            return HalfWriter(file, self) if "w" in mode else file

        patch.setattr(Path, "open", opened)

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if self.fails():
                raise no_space()
            return call(*arguments, **options)

        return run

    def half_written(self, save: Callable[..., None]) -> Callable[..., None]:
        def run(content: Any, path: Path, *rest: Any) -> None:
            save(content, path, *rest)
            if self.fails():
                path.write_bytes(path.read_bytes()[:50])
                raise no_space()

        return run


class HalfWriter:
    """A file whose write may stop half way."""

    def __init__(self, file: Any, disk: FullDisk) -> None:
        self.file, self.disk = file, disk

    def __enter__(self) -> "HalfWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        if self.disk.fails():
            self.file.write(content[: len(content) // 2])
            raise no_space()
        return int(self.file.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def attempt(place: Path, source: Path, position: int, **options: Any) -> tuple[ConfigError | None, bool]:
    """Write under a disk that fails at a position; the error if any, and whether the position was reached."""
    disk, error = FullDisk(position), None
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        try:
            write(place / "model", source, **options)
        except ConfigError as caught:
            error = caught
    return error, disk.calls >= position


def test_a_full_disk_at_any_call_leaves_nothing_or_the_whole(place: Path, source: Path) -> None:
    for position in range(1, 1000):
        error, reached = attempt(place, source, position)
        if error is None:
            assert verify_manifest(place / "model")
            if not reached:
                break
            (place / "model").rename(source / f"whole-{position}")
        else:
            assert "No space left on device" in str(error)
            assert str(place / "model") in str(error)
        assert os.listdir(place) == [], position
    assert position > 20


def test_a_full_disk_while_replacing_leaves_the_old_or_the_new(place: Path, source: Path) -> None:
    write(place / "model", source)
    (place / "model" / "mark").write_text("old")
    for position in range(1, 1000):
        error, reached = attempt(place, source, position, overwrite=True)
        assert verify_manifest(place / "model"), position
        assert (place / "model" / "mark").exists() == (error is not None), position
        (place / "model" / "mark").write_text("old")
        if error is not None:
            assert os.listdir(place) == ["model"], position
        if not reached:
            break
    assert position > 20


SMALL_FILES = """
import resource, sys
from pathlib import Path
import torch
from kvq.errors import ConfigError
from kvq.weights.writer import CheckpointWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with CheckpointWriter(Path(sys.argv[1])) as writer:
        writer.add({"a": torch.zeros(1 << 20)})
        writer.finish({})
except ConfigError as error:
    print(error)
"""


def test_a_real_write_that_fails_is_a_config_error(place: Path) -> None:
    """The system refuses files beyond 4 KiB, which safetensors itself runs into."""
    command = [sys.executable, "-c", SMALL_FILES, str(place / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.startswith(f"can't write {place / 'model'}: ")
    assert os.listdir(place) == []


SMALL_DISK = """
set -e
mount -t tmpfs -o size=256k none "$1"
exec "$2" -c '
import os, sys
from pathlib import Path
import torch
from kvq.errors import ConfigError
from kvq.weights.manifest import verify_manifest
from kvq.weights.writer import CheckpointWriter
place = Path(sys.argv[1])
for count in range(1, 30):
    try:
        with CheckpointWriter(place / "model", max_shard_bytes=20_000) as writer:
            for i in range(count):
                writer.add({f"layer.{i}": torch.zeros(2_500)})
            writer.finish({})
    except ConfigError as error:
        assert not os.listdir(place), os.listdir(place)
        print(count, error)
        break
    assert verify_manifest(place / "model")
    __import__("shutil").rmtree(place / "model")
' "$1"
"""


def test_a_disk_that_is_really_full(place: Path) -> None:
    command = [
        "unshare",
        "--mount",
        "--map-root-user",
        "bash",
        "-c",
        SMALL_DISK,
        "-",
        str(place),
        sys.executable,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "can't write" in done.stdout


def test_files_are_as_the_umask_says_and_replaced_ones_no_wider_than_before(
    place: Path, source: Path
) -> None:
    def modes() -> set[int]:
        return {path.stat().st_mode & 0o777 for path in (place / "model").iterdir()}

    before = os.umask(0o027)
    try:
        write(place / "model", source)
        assert (modes(), (place / "model").stat().st_mode & 0o777) == ({0o640}, 0o750)
        os.umask(0o022)
        (place / "model").chmod(0o700)
        write(place / "model", source, overwrite=True)
        assert (modes(), (place / "model").stat().st_mode & 0o777) == ({0o640}, 0o700)
    finally:
        os.umask(before)
