"""`kvq manifest`: every flipped bit of a folder is found by it, and by each way to load the folder."""

import random
import shutil

import pytest

import kvq as package
from kvq.engine.build import build
from kvq.errors import ModelError
from kvq.models.loading import weights
from kvq.weights.manifest import MANIFEST, manifest_path
from tests.models.gguf.test_files import split

SHORT = ("--context", 64, "--max-windows", 1)


@pytest.fixture(scope="module")
def made(two_layers, tmp_path_factory):
    """Quantized as others do it: without a manifest."""
    folder = tmp_path_factory.mktemp("quantized") / "model"
    package.quantize(two_layers, folder, method="rtn", bits=4)
    (folder / MANIFEST).unlink()
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "model")


def engine(folder):
    """What the server's engine process does at its start and at each restart."""
    build(folder, "int4", {"kv_memory": "4MiB"})


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_it_is_written_once_and_checked_afterwards(kvq, folder):
    status, said, err = kvq("manifest", folder)
    assert (status, err) == (0, "")
    assert said.startswith(f"wrote {folder / MANIFEST}: 6 files, ")
    before = (folder / MANIFEST).read_bytes()
    for options in ((), ("--check",)):
        status, said, _ = kvq("manifest", folder, *options)
        assert (status, said.split(":")[0]) == (0, f"nothing differs from {folder / MANIFEST}")
    assert (folder / MANIFEST).read_bytes() == before


def test_what_differs_is_named_and_not_written_over_unless_asked(kvq, folder):
    kvq("manifest", folder)
    before = (folder / MANIFEST).read_bytes()
    flip(folder / "model.safetensors", 8 * 200_000)
    flip(folder / "config.json", 100)
    for options, expected in ((("--check",), 1), ((), 2)):
        status, said, err = kvq("manifest", folder, *options)
        assert (status, said) == (expected, "")
        assert "model.safetensors is damaged: xxh3" in err
        assert "config.json is damaged: xxh3" in err
    assert "give --overwrite if the files are as they should be" in err
    assert (folder / MANIFEST).read_bytes() == before
    assert kvq("manifest", folder, "--overwrite")[0] == 0
    assert kvq("manifest", folder, "--check")[0] == 0


def test_a_damaged_manifest_is_refused_and_can_be_written_over(kvq, folder):
    (folder / MANIFEST).write_text("{}")
    for options in ((), ("--check",)):
        status, _, err = kvq("manifest", folder, *options)
        assert (status, "files: it lists none" in err) == (2, True)
    assert kvq("manifest", folder, "--overwrite")[0] == 0


def test_wrong_requests(kvq, folder, tmp_path, made):
    for arguments, says in (
        ((folder, "--check"), f"has no {MANIFEST}; kvq manifest {folder} writes one"),
        ((folder, "--check", "--overwrite"), "give one of them"),
        ((tmp_path / "nothing",), "is no model folder"),
    ):
        status, said, err = kvq("manifest", *arguments)
        assert (status, said) == (2, "")
        assert says in err
    cached = shutil.copytree(made, tmp_path / "models--a--b" / "snapshots" / "0123")
    status, _, err = kvq("manifest", cached)
    assert (status, "`hf cache verify a/b`" in err) == (2, True)
    assert not (cached / MANIFEST).exists()


def test_quantized_weights_without_one_are_told_once(folder, two_layers, caplog):
    weights._say_unverified.cache_clear()
    for _ in range(2):
        package.load(folder)
    package.load(two_layers)  # whose numbers are not codes
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert f"flipped bits can't be found; `kvq manifest {folder}` writes one" in said[0]
    assert not (folder / MANIFEST).exists()


def test_the_hubs_cache_is_checked_by_its_own_client(made, tmp_path, caplog):
    cached = shutil.copytree(made, tmp_path / "models--a--b" / "snapshots" / "0123")
    package.load(cached)
    assert "`hf cache verify a/b` compares its files with the hub's" in caplog.text
    assert not (cached / MANIFEST).exists()


@pytest.fixture
def gguf(two_layers, tmp_path):
    """Quantized as others do it: without a manifest."""
    path = tmp_path / "gguf" / "model.gguf"
    path.parent.mkdir()
    package.quantize(two_layers, path, file_format="gguf", gguf_type="Q8_0", device="cpu")
    manifest_path(path).unlink()
    return path


def test_of_a_gguf_file_it_lies_beside_it(kvq, gguf):
    manifest = gguf.with_name(f"model.gguf.{MANIFEST}")
    status, said, err = kvq("manifest", gguf, "--check")
    assert (status, f"has no {manifest.name}; kvq manifest {gguf} writes one" in err) == (2, True)
    for named, done in (
        (gguf, "wrote"),
        (gguf, "nothing differs from"),
        (gguf.parent, "nothing differs from"),
    ):
        status, said, err = kvq("manifest", named)
        assert (status, err) == (0, "")
        assert said.startswith(f"{done} {manifest}: 1 file, ")
    before = manifest.read_bytes()
    flip(gguf, 8 * 1_000_000)
    for options, expected in ((("--check",), 1), ((), 2)):
        status, said, err = kvq("manifest", gguf, *options)
        assert (status, said, "model.gguf is damaged: xxh3" in err) == (expected, "", True)
    assert manifest.read_bytes() == before
    for command in (
        ("perplexity", "--model", gguf, *SHORT),
        ("serve", "--model", gguf),
        ("generate", "--model", gguf, "x"),
    ):
        status, said, err = kvq(*command)
        assert (status, "model.gguf is damaged: xxh3" in err) == (2, True), (command, said, err)
    assert kvq("serve", "--check", "--model", gguf)[0] == 1
    assert kvq("manifest", gguf, "--overwrite")[0] == 0
    assert kvq("manifest", gguf.parent, "--check")[0] == 0


def test_of_a_split_model_any_part_stands_for_all(kvq, two_layers, tmp_path):
    parts = split(two_layers, tmp_path)
    status, said, _ = kvq("manifest", parts[2])
    assert (status, said.startswith(f"wrote {parts[0]}.{MANIFEST}: 3 files, ")) == (0, True)
    parts[1].unlink()
    for named in (parts[0], parts[2]):
        status, _, err = kvq("manifest", named, "--check")
        assert (status, f"{parts[1].name} is damaged: missing" in err) == (1, True)
    status, _, err = kvq("manifest", parts[0], "--overwrite")
    assert (status, f"{parts[1].name} is not there" in err) == (2, True)
    parts[0].unlink()
    status, _, err = kvq("manifest", parts[2], "--check")
    assert (status, f"{parts[0].name} is damaged: missing" in err) == (1, True)


def test_files_without_a_model_have_none(kvq, gguf, tmp_path):
    (gguf.parent / "text.gguf").write_text("a text")
    (tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    cached = gguf.rename(tmp_path / "models--a--b" / "snapshots" / "0123" / "model.gguf")
    short = shutil.copyfile(cached, tmp_path / "short.gguf")
    short.write_bytes(short.read_bytes()[:-1])
    for path, says in (
        (gguf.parent / "text.gguf", "is a file and no GGUF"),
        (gguf, "is no model folder"),
        (cached, "`hf cache verify a/b`"),
        (short, "short.gguf is truncated"),
    ):
        status, said, err = kvq("manifest", path)
        assert (status, said) == (2, "")
        assert says in err
        assert not manifest_path(path).exists()


def test_each_flipped_bit_is_found_by_all_that_load(kvq, folder):
    kvq("manifest", folder)
    names = sorted(path.name for path in folder.iterdir())
    chance = random.Random(3)
    for trial in range(16):
        path = folder / chance.choice([*names, "model.safetensors"])
        bit = chance.randrange(path.stat().st_size * 8)
        flip(path, bit)
        for load in (package.load, engine):
            with pytest.raises(ModelError, match=path.name):
                load(folder)
        if trial < 2:
            for command in (
                ("perplexity", "--model", folder, *SHORT),
                ("serve", "--model", folder),
                ("generate", "--model", folder, "x"),
            ):
                status, said, err = kvq(*command)
                assert (status, path.name in err) == (2, True), (command, said, err)
            assert kvq("serve", "--check", "--model", folder)[0] == 1
        flip(path, bit)
    engine(folder)
