"""The checker, imported from its folder as it is run from there."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

SPEC = Path(__file__).parents[2] / "spec"
_MODULES = (
    *("findings", "names", "packing", "channels", "codec"),
    *("xxh3", "recipes", "layouts", "prefixes", "check"),
)


@pytest.fixture(scope="session")
def spec() -> Iterator[dict[str, ModuleType]]:
    """Its modules by name; they leave no trace in other tests."""
    sys.path.insert(0, str(SPEC))
    try:
        yield {name: import_module(name) for name in _MODULES}
    finally:
        sys.path.remove(str(SPEC))
        for name in _MODULES:
            sys.modules.pop(name, None)
