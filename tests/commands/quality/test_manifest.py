"""`kvq manifest`: every flipped bit of a folder is found by it, and by each way to load the folder."""

import random
import shutil

import pytest

import kvq as package
from kvq.engine.build import build
from kvq.errors import ModelError
from kvq.models.loading import weights
from kvq.weights.manifest import MANIFEST

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
