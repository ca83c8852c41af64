"""A process loads what it uses: packages import a name's module when somebody asks for the name."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from threading import RLock
from typing import Any

_importing = RLock()


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. `homes`: its names, by the modules that define them.

    It is the `else` of the package's imports under `TYPE_CHECKING`, so that type checkers know its names and
    no others. What the package itself needs is imported from where it is defined.
    """
    found = {name: home for home, names in homes.items() for name in names}

    def look_up(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(found[name]), name)

    return look_up


def import_whole(library: str) -> None:
    """Import a library that ends with another module in its own place, as transformers does.

    A thread that imports a name from it while another does so for the first time finds the module that was
    there before, without the name.
    """
    with _importing:
        import_module(library)


@contextmanager
def unseen(library: str) -> Iterator[None]:
    """Who looks for a library meanwhile finds it not installed, unless it is imported already."""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[library]
