"""Cache backends by name: ours, other packages', and those that can't be loaded."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvq.cache import KVCache, backend
from kvq.cache.backend import cache_backend, cache_backends, with_stores
from kvq.cache.conformance import check_backend
from kvq.cache.dense_backend import DenseCache
from kvq.errors import ConfigError

Install = Callable[[str, str, str, str], None]  # package, entry point, module, its source


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package of one module with one entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(package: str, name: str, module: str, source: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[kvq.cache_backends]\n{name} = {module}:Cache\n")

    return put


def test_ours_are_found_by_name() -> None:
    assert cache_backend("kvq") is KVCache
    assert cache_backend("dense") is DenseCache
    assert {"kvq", "dense"} <= set(cache_backends())


def test_pyproject_names_the_same_backends() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][backend.ENTRY_POINTS] == backend._BUILT_IN


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown cache backend 'dens'; did you mean 'dense'\? installed:.*kvq"
    ):
        cache_backend("dens")


def test_another_package_plugs_its_backend_in(install: Install) -> None:
    source = "from kvq.cache.dense_backend import DenseCache\nclass Cache(DenseCache):\n    pass\n"
    install("rival", "rival", "rival_cache_a", source)
    assert "rival" in cache_backends()
    factory = cache_backend("rival")
    assert factory.__name__ == "Cache"
    check_backend(factory)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_that_name\n", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise RuntimeError('needs a GPU')\n", "RuntimeError: needs a GPU"),
        ("x = 1\n", "AttributeError: module 'rival_cache_.' has no attribute 'Cache'"),
        ("Cache = 3\n", "must be a class or a function that makes a cache, got int"),
    ],
)
def test_a_broken_package_is_named_and_the_others_still_work(
    source: str, message: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rival_cache_b", raising=False)
    install("rival", "rival", "rival_cache_b", source)
    with pytest.raises(ConfigError, match=rf"cache backend 'rival' of rival 1\.2 .*{message}.*uninstall"):
        cache_backend("rival")
    assert cache_backend("dense") is DenseCache
    assert "rival" in cache_backends()


def test_two_packages_with_one_name_are_both_named(install: Install) -> None:
    install("rival", "fast", "rival_cache_c", "Cache = dict\n")
    install("other", "fast", "rival_cache_d", "Cache = dict\n")
    with pytest.raises(
        ConfigError, match=r"'fast' is claimed by (rival|other) 1\.2 and (rival|other) 1\.2; keep one"
    ):
        cache_backend("fast")


def test_no_package_can_take_our_names(install: Install) -> None:
    install("rival", "kvq", "rival_cache_e", "raise RuntimeError\n")
    assert cache_backend("kvq") is KVCache


def test_naming_backends_imports_none_of_them() -> None:
    code = (
        "import sys; from kvq.cache.backend import cache_backends; cache_backends();"
        "assert 'kvq.cache.dense_backend' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_backend_without_stores_keeps_its_own_states():
    cache = SimpleNamespace(group_of={0: 0, 1: 0}, states="its states")

    made = with_stores(cache)

    assert len(made.stores) == 2
    assert made.states == "its states"
    cache.states = None  # as after it grew
    assert made.states is None
    del cache.states
    assert made.states is None
