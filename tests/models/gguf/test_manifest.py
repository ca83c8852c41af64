"""The manifest of a model in GGUF files: whatever differs is refused by all that load, and named."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kvq
from kvq.engine.build import build
from kvq.errors import KVQError, ModelError
from kvq.models.loading import weights
from kvq.models.loading.prepared import prepare
from kvq.weights.manifest import (
    MANIFEST,
    find_faults,
    listed_files,
    manifest_path,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from tests.models.gguf.kit import convert
from tests.models.gguf.test_files import split

NAMED = r"model\.gguf (is damaged: (bytes|xxh3): .*model\.gguf --overwrite|is a file and no GGUF)"


@pytest.fixture(scope="module")
def whole(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    kvq.quantize(two_layers, path, file_format="gguf", gguf_type="Q4_K_M", device="cpu")
    return path.read_bytes()


@pytest.fixture
def path(whole: bytes, tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").write_bytes(whole)
    return tmp_path / "model.gguf"


@pytest.fixture
def parts(two_layers: Path, tmp_path: Path) -> list[Path]:
    found = split(two_layers, tmp_path)
    assert set(write_manifest(found[0])) == {part.name for part in found}
    return found


def damaged(chance: random.Random, whole: bytes) -> bytes:
    """A bit flipped, often in the header; or less; or more."""
    if (kind := chance.randrange(4)) == 0:
        return whole[: chance.randrange(len(whole))]
    if kind == 1:
        return whole + chance.randbytes(chance.choice((1, 32, 4096)))
    content, end = bytearray(whole), chance.choice((24, 2000, len(whole), len(whole)))
    content[chance.randrange(end)] ^= 1 << chance.randrange(8)
    return bytes(content)


def test_300_damaged_files_are_refused_by_name(path: Path, whole: bytes) -> None:
    """Without the manifest, some are: what was done to their weights is no longer seen."""
    write_manifest(path)
    chance, refused = random.Random(11), 0
    for _ in range(300):
        path.write_bytes(damaged(chance, whole))
        with pytest.raises(ModelError, match=NAMED):
            prepare(path, device="cpu")
    manifest_path(path).unlink()
    for _ in range(60):
        path.write_bytes(damaged(chance, whole))
        try:
            prepare(path, device="cpu")
        except KVQError:
            refused += 1
    assert 10 < refused < 50


def load(path: Path) -> None:
    kvq.load(path, device="cpu")


def engine(path: Path) -> None:
    """What the server's engine process does at its start and at each restart."""
    build(path, "int4", {"kv_memory": "4MiB"})


@pytest.mark.parametrize("run", [load, engine], ids=lambda run: run.__name__)
def test_all_that_load_compare(run: Callable[[Path], None], path: Path, whole: bytes) -> None:
    write_manifest(path)
    run(path)
    run(path.parent)  # which holds this model only
    chance = random.Random(5)
    for _ in range(8):
        path.write_bytes(damaged(chance, whole))
        with pytest.raises(ModelError, match=NAMED):
            run(path)
    path.write_bytes(whole)
    run(path)


def test_every_part_is_listed_once_beside_the_first(parts: list[Path]) -> None:
    manifest = parts[0].with_name(f"{parts[0].name}.{MANIFEST}")
    assert manifest_path(parts[0]) == manifest
    assert manifest.is_file()
    assert listed_files(parts[0]) == parts
    for part in parts:
        before = part.read_bytes()
        part.write_bytes(before[:-1] + bytes([before[-1] ^ 4]))
        for named in parts:
            with pytest.raises(ModelError, match=rf"{part.name} is damaged: xxh3"):
                load(named)
        part.unlink()
        with pytest.raises(
            ModelError, match=rf"{part.name} is damaged: missing, but {manifest.name} lists it"
        ):
            load(parts[1] if part is parts[0] else parts[0])
        part.write_bytes(before)
    load(parts[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "not JSON"),
        (lambda raw: raw[:-2], "not JSON"),
        (lambda raw: raw.replace(b'"bytes": ', b'"bytes": 1'), "digest: its bytes are not the ones"),
        (lambda raw: raw.replace(b"model.gguf", b"../el.gguf"), "is no file of this folder"),
        (lambda raw: b"{}", "files: it lists none"),
    ],
)
def test_a_damaged_manifest_is_refused(path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    write_manifest(path)
    manifest = manifest_path(path)
    manifest.write_bytes(change(manifest.read_bytes()))
    with pytest.raises(ModelError, match=rf"{manifest.name} is damaged: .*{message}"):
        load(path)


def test_another_models_manifest_does_not_do(path: Path) -> None:
    write_manifest(path)
    other = shutil.copyfile(path, path.with_name("other.gguf"))
    load(other)  # several files of one folder have manifests of their own, or none
    shutil.copyfile(manifest_path(path), manifest_path(other))
    with pytest.raises(ModelError, match=r"other\.gguf is not listed in other\.gguf\.kvq-manifest\.json"):
        load(other)
    path.unlink()
    with pytest.raises(
        ModelError, match=r"model\.gguf is damaged: missing.*kvq manifest .*other\.gguf --over"
    ):
        load(other)


def test_faults_of_all_parts_are_told(parts: list[Path]) -> None:
    parts[0].write_bytes(b"GGUF")
    parts[2].unlink()
    said = [str(fault) for fault in find_faults(parts[0], read_manifest(parts[0]) or {})]
    assert [text.split(" is damaged: ")[0] for text in said] == [str(parts[0]), str(parts[2])]
    assert all(f"kvq manifest {parts[0]} --overwrite" in text for text in said)


def test_a_manifest_of_a_folder_lists_no_gguf_and_none_of_its_manifests(
    two_layers: Path, tmp_path: Path, whole: bytes
) -> None:
    folder = shutil.copytree(two_layers, tmp_path / "folder")
    (folder / "model.gguf").write_bytes(whole)
    write_manifest(folder / "model.gguf")
    listed = write_manifest(folder)
    assert not [name for name in listed if "gguf" in name]
    write_manifest(folder / "model.gguf")
    assert verify_manifest(folder)
    assert verify_manifest(folder / "model.gguf")


def test_blocks_without_one_are_told_once(
    path: Path, two_layers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights._say_unverified.cache_clear()
    for _ in range(2):
        load(path)
    load(convert(two_layers, path.with_name("floats.gguf"), has_tokenizer=True))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert f"no model.gguf.{MANIFEST}, so flipped bits" in said[0]
    assert f"`kvq manifest {path}` writes one" in said[0]
    write_manifest(path)
    weights._say_unverified.cache_clear()
    caplog.clear()
    load(path)
    assert "flipped bits" not in caplog.text


def test_files_in_the_hubs_cache_are_checked_by_its_own_client(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "model.gguf").symlink_to(path)
    weights._say_unverified.cache_clear()
    load(folder / "model.gguf")
    assert "`hf cache verify a/b` compares its files with the hub's" in caplog.text
