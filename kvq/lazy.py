"""Lazy imports: a package imports the module that defines a name when the name is first used."""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from threading import RLock
from typing import Any

_importing = RLock()


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package. `homes`: the package's names, keyed by defining module.

    Call it in the `else` branch of the package's `TYPE_CHECKING` imports, so that type checkers see exactly
    these names. Modules inside the package import names from the defining modules.
    """
    found = {name: home for home, names in homes.items() for name in names}

    def look_up(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(found[name]), name)

    return look_up


def import_whole(library: str) -> None:
    """Import a library that replaces its own module at the end of its import, as transformers does.

    Without this function, if one thread imports a name while another is importing the library for the first
    time, the first thread can find the old module, which lacks the name.
    """
    with _importing, uncollected():
        import_module(library)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection within the block: what a large library's import makes stays in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def unseen(library: str) -> Iterator[None]:  # D217: torch hidden while transformers is imported
    """Make a library appear not installed within the block, unless it has already been imported."""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[library]
