"""Names of packages and libraries are imported by who uses them."""

import importlib
import subprocess
import sys

import pytest

from kvq.lazy import lazily, unseen


@pytest.mark.parametrize("package", ["kvq", "kvq.cache", "kvq.engine", "kvq.evals", "kvq.models"])
def test_all_that_a_package_names_is_there_and_nothing_else(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'KvqCash'"):
        _ = module.KvqCash


def test_a_name_is_looked_up_where_it_is_defined():
    look_up = lazily("colours", {"colorsys": ("rgb_to_hls", "rgb_to_hsv")})
    sys.modules.pop("colorsys", None)
    with pytest.raises(AttributeError, match="colours"):
        look_up("yiq_to_rgb")
    assert "colorsys" not in sys.modules
    assert look_up("rgb_to_hsv") is sys.modules["colorsys"].rgb_to_hsv


def test_an_unseen_library_is_not_installed_for_a_while():
    sys.modules.pop("colorsys", None)
    with pytest.raises(ValueError, match="any"), unseen("colorsys"):  # noqa: PT012
        assert importlib.util.find_spec("colorsys") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("colorsys")
        raise ValueError("any")
    loaded = importlib.import_module("colorsys")
    with unseen("colorsys"):
        assert importlib.import_module("colorsys") is loaded


_THREADS = """
import threading, kvq

def load():
    loaded.append(kvq.load("tiny"))

loaded = []
threads = [threading.Thread(target=load) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
print(len(loaded))
"""


def test_threads_that_load_first_thing_in_a_process_all_have_their_models():
    ran = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, check=False)
    assert ran.stdout == "4\n", ran.stderr
