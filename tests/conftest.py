"""Fixtures that several tests share. Nothing here reaches for a network."""

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels on CPU tensors, before anything imports Triton

import torch  # noqa: F401 - first: a command that runs no model in this process would hide it from transformers

with contextlib.suppress(ImportError):  # Triton is not everywhere
    from triton import knobs

    from tests.interpreter import make_quicker

    if knobs.runtime.interpret:  # what is compiled goes through the same functions
        make_quicker()

QUICKER = str(Path(__file__).parent / "quicker")  # what Python processes that tests start find first
if QUICKER not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    kept = tempfile.TemporaryDirectory(prefix="kvq-tests-")  # for all processes of these tests, until the end
    os.environ["KVQ_TEST_NAMES"] = str(Path(kept.name) / "names")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [QUICKER, os.environ.get("PYTHONPATH")]))

if "KVQ_TEST_KERNELS" in os.environ:  # a folder with another build of the C++ kernels: `make sanitize`
    from kvq.kernels.native import library

    library._path = lambda: next(Path(os.environ["KVQ_TEST_KERNELS"]).rglob("_kernels*.so"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:  # D375: frozen after collection: engines collect garbage
    """Tests and libraries stay: who collects garbage, as every engine does, need not look through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that says how many of its cases run daily, the others are long; chance says which."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("daily") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        [count] = same[0].get_closest_marker("daily").args
        for item in sorted(same, key=lambda item: crc32(item.nodeid.encode()))[count:]:
            item.add_marker(pytest.mark.long)


SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def tiny():
    """The embedded model over unquantized KV, loaded once."""
    import kvq

    return kvq.load("tiny")


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory) -> Path:
    """A folder with the embedded model's first two layers and its tokenizer: not to be changed."""
    from tests.helpers_models import save_first_layers

    folder = tmp_path_factory.mktemp("model") / "two"
    save_first_layers(folder, 2)
    return folder


@pytest.fixture(scope="session")
def wikitext() -> str:
    """WikiText-2's test split, where it is at hand."""
    path = SHARED / "data" / "wikitext-2" / "test.txt"
    if not path.is_file():
        pytest.skip("WikiText-2 is not at hand")
    return path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True, scope="session")
def load_checks(tmp_path_factory) -> Iterator[None]:
    """What load checks find in this process is kept in a folder of the tests' own."""
    from kvq.models.check import load_check

    folder = tmp_path_factory.mktemp("checks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_check, "memory_folder", lambda: folder)
        yield
