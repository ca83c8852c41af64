"""Writing result files so that a crash never leaves half of one."""

import os
import tempfile
from pathlib import Path

from kvq.errors import ConfigError


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes, *, permissions: int = 0o644) -> None:
    """Write `content` beside `path` and rename it into place. A symbolic link keeps pointing there.

    The file gets those Unix permissions, whatever an older one had.

    Raises:
        ConfigError: the folder is missing or full, or nothing can be written there.
    """
    target = check_writable(path)
    aside = ""
    try:
        handle, aside = tempfile.mkstemp(prefix=".kvq-", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(aside, permissions)
        os.replace(aside, target)
    except BaseException as error:
        if aside and os.path.exists(aside):
            os.unlink(aside)
        if isinstance(error, OSError):
            raise ConfigError(f"can't write {path}: {error.strerror or error}") from error
        raise


def check_writable(path: str | Path) -> Path:
    """Return the file that `path` leads to; called before long work starts.

    Raises:
        ConfigError: nothing can be written there: no such folder, no permission, too long a name,
            or something that is not a regular file.
    """
    try:
        target = Path(path).resolve()
        if target.is_dir():
            raise ConfigError(f"can't write {str(path)!r}: it is a folder; name a file inside it")
        if target.exists() and not target.is_file():
            raise ConfigError(f"can't write {path}: it is not a regular file; name another")
        if not target.parent.is_dir():
            raise ConfigError(f"can't write {path}: there is no folder {Path(path).parent}; create it first")
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        raise ConfigError(f"can't write {path}: {getattr(error, 'strerror', None) or error}") from error
    if not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise ConfigError(f"can't write {path}: permission denied; choose another place")
    return target
