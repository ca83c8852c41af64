"""What setup.py compiles, and what is said where it can't; a script stands in for the compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvq.kernels.native import library

ROOT = Path(__file__).parents[1]
# Only what tells the CPU's instruction sets is compiled in earnest; of the rest the file names are enough.
SCRIPT = """#!/bin/sh
case "$*" in *native/variants*) exec g++ "$@";; esac
echo "$@" >> "{log}"
case "$*" in *KVQ_VARIANT={fails}*) echo "line 1" >&2; echo "cc1plus: error: unknown" >&2; exit 3;; esac
while [ "$1" != -o ]; do shift; done
echo > "$2"
"""


def build(
    folder: Path, *, compiler: str = "", fails: str = "nothing", variants: str = "here"
) -> tuple[str, str]:
    """What setup.py says, and what it had compiled."""
    log, script = folder / "log", folder / "compiler"
    script.write_text(SCRIPT.format(log=log, fails=fails))
    script.chmod(0o755)
    done = subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            folder / "lib",
            "--build-temp",
            folder,
        ],
        cwd=ROOT,
        env=os.environ
        | {"CXX": compiler or str(script), "LDCXXSHARED": f"{script} -shared", "KVQ_VARIANTS": variants},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr, log.read_text() if log.exists() else ""


def compiled(log: str) -> list[str]:
    """Variants, once for each source."""
    words = [word for line in log.splitlines() for word in line.split() if word.startswith("-DKVQ_VARIANT=")]
    return [word.partition("=")[2] for word in words if not word.endswith("=common")]


@pytest.mark.parametrize("fails", ["nothing", "best"])
def test_here_is_the_best_variant_that_cpu_and_compiler_know(tmp_path, fails):
    best = library.loaded().best
    lower = library.VARIANTS[library.VARIANTS.index(best) + 1 :]
    if fails == "best" and not lower:
        pytest.skip("this CPU runs the portable variant alone")
    said, log = build(tmp_path, fails=best if fails == "best" else "nothing")
    wanted = {best: 19} if fails == "nothing" else {best: 19, lower[0]: 19}
    assert {name: compiled(log).count(name) for name in compiled(log)} == wanted
    assert said.startswith(f"kvq: compiling the C++ kernels for {best}: 19 files, about ")
    assert (f"without the variant {best}" in said) == (fails == "best")
    assert list((tmp_path / "lib").rglob("_kernels*"))


def test_all_variants_are_compiled_unless_told_otherwise(tmp_path):
    _, log = build(tmp_path, variants="all")
    assert set(compiled(log)) >= set(library.VARIANTS[library.VARIANTS.index(library.loaded().best) :])
    assert len(compiled(log)) % 19 == 0


def test_none_is_compiled_where_that_is_another_steps_work(tmp_path):
    assert build(tmp_path, variants="none") == ("", "")


def test_a_compiler_that_fails_is_told_with_its_last_lines_and_they_stay(tmp_path):
    said, _ = build(tmp_path, fails="common")
    for part in (
        "not built",
        "-DKVQ_VARIANT=common",
        "ended with 3:\nline 1\ncc1plus: error",
        "apt install g++",
    ):
        assert part in said
    (note,) = (tmp_path / "lib").rglob("not_built.txt")
    assert note.read_text() in said
    assert not list((tmp_path / "lib").rglob("_kernels*"))
    build(tmp_path)
    assert not note.exists()


def test_no_compiler_is_told(tmp_path):
    said, _ = build(tmp_path, compiler="/nowhere/g++")
    assert "/nowhere/g++ can't be run (No such file or directory)" in said
    assert "apt install g++" in said


def test_an_unknown_choice_of_variants_is_refused(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        build(tmp_path, variants="native")
    assert "must be all, here or none, got 'native'" in refused.value.stderr


def test_an_editable_installation_gets_the_note_beside_its_library(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "kvq/kernels/native").mkdir(parents=True)
    for name in ("version.py", "__init__.py", "kernels/native/__init__.py"):
        shutil.copy(ROOT / "kvq" / name, tmp_path / "kvq" / name)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"CXX": "/nowhere/g++"}, check=True, capture_output=True
    )
    assert "can't be run" in (tmp_path / "kvq/kernels/native/not_built.txt").read_text()
