"""Commands that need packages which are not installed say so, with the command that installs them."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvq
from kvq import extras
from kvq.errors import ConfigError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = PROJECT["optional-dependencies"]

# Runs command lines where kvq's optional packages can't be found, and nothing can be done either: no model
# and no file exists, and what loads models or listens is out of order.
BARE = """
import contextlib, importlib.machinery, io, json, socket, sys

hidden, lines = json.loads(sys.argv[1])
find = importlib.machinery.PathFinder.find_spec

@classmethod
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)

importlib.machinery.PathFinder.find_spec = find_spec
socket.socket.bind = socket.socket.connect = None
from kvq import cli

found = []
for line in lines:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(line.split())
        except SystemExit as ended:
            status = ended.code
        except Exception as error:
            status = repr(error)
    found.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""
NEEDS = {  # command line -> what it needs, and the extra that brings it
    "serve --model nowhere": ("kvq serve needs fastapi, uvicorn, h11, msgspec", "serve"),
    "serve --config nothing.yaml": ("--config needs pyyaml", "serve"),
    "run-batch ../there.txt out.jsonl --model nowhere": ("kvq run-batch needs fastapi", "serve"),
    "bench serve --model nowhere": ("kvq bench serve needs fastapi", "serve"),
    "bench vllm --model nowhere": ("kvq bench vllm needs vllm", "vllm"),
    "perplexity --model nowhere --plot out.svg --text ../there.txt": (
        "the plot out.svg needs matplotlib",
        "plot",
    ),
    "perplexity --model nowhere --html out.html --text ../there.txt": ("--html needs matplotlib", "plot"),
    "eval nowhere --html out.html --text ../there.txt": ("--html needs matplotlib", "plot"),
    "tune nowhere --plot out.svg": ("the plot out.svg needs matplotlib", "plot"),
    "tune nowhere --html out.html --text ../there.txt": ("--html needs matplotlib", "plot"),
    "plan --model nowhere --gpu none --context 9 --html out.html": ("--html needs matplotlib", "plot"),
    "simulate --model nowhere --gpu none --rate 1 --html out.html": ("--html needs matplotlib", "plot"),
    "bench attention --kv nothing --plot out.svg": ("the plot out.svg needs matplotlib", "plot"),
    "bench engine --model nowhere --plot out.svg": ("the plot out.svg needs matplotlib", "plot"),
    "demo --out out": ("the plot out/plot.svg needs matplotlib", "plot"),
    "eval nowhere --tasks perplexity,lm_eval:hellaswag": ("lm_eval:hellaswag needs lm-eval", "eval"),
    "perplexity --model nowhere --text ../there.parquet": (
        "the Parquet file ../there.parquet needs pyarrow",
        "eval",
    ),
    "calibrate nowhere --check ../there.parquet": ("the Parquet file ../there.parquet needs pyarrow", "eval"),
    "tune nowhere --text hf:nothing": ("hf:nothing needs datasets", "eval"),
    "quantize nowhere --out out --method nf4": ("--method nf4 needs bitsandbytes, accelerate", "bnb"),
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """What each command line ends with without optional packages, and the folder where it was called."""
    folder = tmp_path_factory.mktemp("bare") / "here"
    folder.mkdir()
    for name in ("there.txt", "there.parquet"):
        (folder.parent / name).touch()
    given = json.dumps([list(extras.PACKAGES), list(NEEDS)])
    done = subprocess.run(
        [sys.executable, "-c", BARE, given], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(NEEDS, json.loads(done.stdout), strict=True)), folder


@pytest.mark.parametrize("line", NEEDS)
def test_commands_say_what_to_install_before_they_do_anything(bare, line):
    says, extra = NEEDS[line]
    status, out, err = bare[0][line]
    assert (status, out) == (2, "")
    assert err.startswith(f"kvq: error: {says}")
    assert err.endswith(f" not installed; pip install '.[{extra}]' in a clone of kvq\n")
    assert list(bare[1].iterdir()) == []


def distributions(extra: str) -> set[str]:
    """The packages that an extra brings, those of the extras in it included."""
    found = set()
    for requirement in OPTIONAL[extra]:
        name, inner = re.match(r"([\w-]+)(?:\[(.*?)\])?", requirement).groups()
        is_own = name == PROJECT["name"]
        found |= set().union(*map(distributions, inner.split(","))) if is_own else {name}
    return found


def test_every_package_is_in_the_extra_that_its_error_names():
    for name, extra in extras.PACKAGES.values():
        assert name in distributions(extra)
    known = {name for name, extra in extras.PACKAGES.values() if extra not in extras.INSIDE}
    assert distributions("all") == known
    assert distributions("standard") == {
        name for name, extra in extras.PACKAGES.values() if extra in ("serve", "eval", "plot")
    }


def test_nothing_tells_to_install_kvq_from_an_index():
    """It is on none: a clone's folder, or a wheel, is what pip can take."""
    places = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").iterdir()]
    places += [
        path for folder in ("kvq", "deploy") for path in (ROOT / folder).rglob("*") if path.suffix != ".so"
    ]
    for path in places:
        if path.is_file() and path.suffix != ".pyc":
            told = re.search(
                r"install[^\n]*kvq-toolkit\b", path.read_text(encoding="utf-8", errors="replace")
            )
            assert told is None, f"{path}: {told and told[0]}"


@pytest.mark.parametrize(("package", "pinned"), [("torch", "2.14.0"), ("llguidance", "1.7.6")])
def test_what_vllm_pins_is_admitted(package, pinned):
    """vLLM 0.32 and 0.33 take llguidance 1.7 alone, 0.33 torch 2.14.0 alone; `make resolve` asks pip."""
    (found,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == package]
    assert found.specifier.contains(pinned)


def test_readme_and_make_install_what_the_commands_below_need():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^pip install '\.\[standard\]'", readme, re.MULTILINE)
    assert "$(call install,standard," in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "datasets_of_mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not extras.is_installed("datasets_of_mine")
    assert extras.is_installed("matplotlib")


def test_one_missing_package_of_several_is_named_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ConfigError, match=r"^x needs msgspec, which is not installed; pip install"):
        extras.require("x", extras.SERVER)
    assert extras.missing_packages("serve") == ["msgspec"]


def test_without_triton_a_gpu_says_what_to_install(monkeypatch):
    from kvq.kernels.gpu import support
    from kvq.kernels.spec import Device

    monkeypatch.setattr(support, "is_installed", {"triton": False}.get)
    support._has_triton.cache_clear()
    found = support.supports_linear(None, Device(type="cuda", name="H100", capability=(9, 0)))
    support._has_triton.cache_clear()
    assert found.reason == "Triton is not installed; pip install '.[gpu]' in a clone of kvq"


def test_optional_packages_are_asked_for_in_one_place():
    """Nothing else of the package looks for packages or tells how to install them."""
    for path in Path(kvq.__file__).parent.rglob("*.py"):
        if path.name != "extras.py":
            source = path.read_text(encoding="utf-8")
            assert "find_spec" not in source, path
            assert not re.search(r"raise .*pip install", source), path
