"""What an installation holds: importable from every folder, with all that the package reads."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import kvq

ROOT = Path(__file__).parents[1]
PACKAGE = Path(kvq.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WRITTEN_LATER = {".py", ".pyc", ".so"}  # Python's own, and what setup.py compiles

IMPORT = "import site; site.addsitedir('site'); import kvq; print(kvq.__version__, kvq.__file__)"


def test_an_editable_clone_named_kvq_is_importable_from_its_parent(tmp_path):
    clone = tmp_path / "kvq"  # as `git clone` names it
    (clone / "kvq").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for name in ("__init__.py", "lazy.py", "version.py", "errors.py"):  # all that `import kvq` reads
        shutil.copy(PACKAGE / name, clone / "kvq")
    build = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_editable('.')"]
    subprocess.run(build, cwd=clone, check=True, capture_output=True)
    with zipfile.ZipFile(next(clone.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")

    # Without the packages of this environment, of which kvq is one, and without PYTHONPATH
    found = subprocess.run(
        [sys.executable, "-ES", "-c", IMPORT], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert found.stdout.split() == [kvq.__version__, str(clone / "kvq" / "__init__.py")], found.stderr


def test_wheels_hold_every_file_that_is_no_module():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["kvq"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    missing = {path for path in PACKAGE.rglob("*") if path.is_file()} - packed
    assert {path for path in missing if path.suffix not in WRITTEN_LATER} == set()
    assert all(any(PACKAGE.glob(pattern)) for pattern in patterns)
