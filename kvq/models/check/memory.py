"""Stored findings of load checks: a file for each model and format.

It lies in the user's cache folder, outside the model's. A file that is damaged, of another version or for
something else counts as none; one that can't be written is done without.
"""

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError
from kvq.fileio import write_text
from kvq.formats import KVRecipe
from kvq.models.loading.prepared import PreparedModel
from kvq.strict_json import read

VERSION = 1  # raised with what decides: codecs, the text, limits
_log = logging.getLogger("kvq")


def memory_folder() -> Path:  # D48: a model's folder may be read-only
    """Return the folder of the files."""
    return Path.home() / ".cache" / "kvq" / "checks"


def recall(model: PreparedModel, recipe: KVRecipe) -> dict[str, Any] | None:
    """The fields of what was found of a model, by its weights' digest, and a format; None if nothing was."""
    key = _key(model, recipe)
    try:
        data = read(memory_folder() / f"{key}.json")
        is_whole = data["seal"] == _digest([key, data["found"]])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None
    return dict(data["found"]) if is_whole else None


def remember(model: PreparedModel, recipe: KVRecipe, found: Any) -> None:
    """Write down what was found, a dataclass, if that can be done."""
    key, fields = _key(model, recipe), asdict(found)
    try:
        folder = memory_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{key}.json", json.dumps({"found": fields, "seal": _digest([key, fields])}))
    except (OSError, RuntimeError, ConfigError) as error:
        _log.info("what the check found can't be kept, so it will run again: %s", error)


def is_first(news: str) -> bool:
    """True if that was never told on this machine; from now on it was. False, too, if it can't be kept."""
    try:
        memory_folder().mkdir(parents=True, exist_ok=True)
        (memory_folder() / f"{news}.told").touch(exist_ok=False)
    except (OSError, RuntimeError):
        return False
    return True


def _key(model: PreparedModel, recipe: KVRecipe) -> str:
    """Return a key of everything that the result depends on."""
    rounded_to = None if model.rounded_to is None else model.rounded_to.name
    size = model.block_size if recipe.is_staged else None
    return _digest([VERSION, model.digest, rounded_to, recipe.digest(), size])[:32]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
