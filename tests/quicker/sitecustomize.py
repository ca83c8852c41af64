"""Found first by Python processes that tests start: transformers' list of its models is made once.

transformers reads its 1,100 folders of models for the names that they define whenever a process imports it.
"""

import os
import pickle
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_NAME = "transformers.utils.import_utils"
_KEPT = os.environ.get("KVQ_TEST_NAMES", "")  # a file of the tests' own


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _keep(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _keep(module: Any) -> None:
    """What is asked for first, the structure of all models, is read from the file, or written there."""
    real, found = module.create_import_structure_from_path, {}
    try:
        with open(_KEPT, "rb") as file:
            found = pickle.load(file)
    except OSError:
        pass

    def read(folder: Any) -> Any:
        key = str(folder)
        if key in found:
            return found[key]
        if os.path.basename(key) != "models":
            return real(folder)
        made = found[key] = real(folder)
        written = f"{_KEPT}.{os.getpid()}"
        with open(written, "wb") as file:
            pickle.dump(found, file)
        os.replace(written, _KEPT)
        return made

    module.create_import_structure_from_path = read


if _KEPT:
    sys.meta_path.insert(0, _Finder())
