"""Stored findings of load checks: a file for each model and format.

The files are in the user's cache folder, outside the model's folder. A file that is damaged, or was written
for another version, model or format, is ignored. A failed write is not an error.
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

VERSION = 1  # increased if codecs, the text or limits change
_log = logging.getLogger("kvq")


def memory_folder() -> Path:  # D48: a model's folder may be read-only
    """Return the folder of the stored findings."""
    return Path.home() / ".cache" / "kvq" / "checks"


def recall(model: PreparedModel, recipe: KVRecipe) -> dict[str, Any] | None:
    """Return the fields of the stored findings for a model and a format, or None if there are none."""
    key = _key(model, recipe)
    try:
        data = read(memory_folder() / f"{key}.json")
        is_whole = data["seal"] == _digest([key, data["found"]])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None
    return dict(data["found"]) if is_whole else None


def remember(model: PreparedModel, recipe: KVRecipe, found: Any) -> None:
    """Store the findings, a dataclass instance, if the file can be written."""
    key, fields = _key(model, recipe), asdict(found)
    try:
        folder = memory_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{key}.json", json.dumps({"found": fields, "seal": _digest([key, fields])}))
    except (OSError, RuntimeError, ConfigError) as error:
        _log.info("what the check found can't be kept, so it will run again: %s", error)


def is_first(news: str) -> bool:
    """Return True on the first call for `news` on this machine; False later, or if recording it fails."""
    try:
        memory_folder().mkdir(parents=True, exist_ok=True)
        (memory_folder() / f"{news}.told").touch(exist_ok=False)
    except (OSError, RuntimeError):
        return False
    return True


def _key(model: PreparedModel, recipe: KVRecipe) -> str:
    """Return a key derived from everything that the findings depend on."""
    rounded_to = None if model.rounded_to is None else model.rounded_to.name
    size = model.block_size if recipe.is_staged else None
    inputs = [model.block_inputs.value] if model.is_gguf else []
    return _digest([VERSION, model.digest, rounded_to, recipe.digest(), size, *inputs])[:32]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
