"""Writing result files so that a crash never leaves half of one."""

import os
import tempfile
from pathlib import Path

from kvq.errors import ConfigError


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 beside `path` and rename it into place.

    Raises:
        ConfigError: the folder is missing or can't be written to.
    """
    target = Path(path)
    check_writable(target)
    handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(aside, 0o644)
        os.replace(aside, target)
    except BaseException:
        os.unlink(aside)
        raise


def check_writable(path: str | Path) -> None:
    """Raise ConfigError unless a file can be made at `path`; called before long work starts."""
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; name a file inside it")
    if not target.parent.is_dir():
        raise ConfigError(f"can't write {target}: there is no folder {target.parent}; create it first")
    if not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise ConfigError(f"can't write {target}: permission denied; choose another place")
