"""File output: writes result files so that a crash never leaves a partial file."""

import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvq.errors import ConfigError, explained

NEW = 0o666  # requested permissions; the umask removes some
PRIVATE = 0o600
LEAST_SECRET = 16  # bytes
_MOST_SECRET = 1 << 16  # bytes; a longer file is not a key


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes, *, permissions: int | None = None) -> None:
    """Write `content` to a temporary file and rename it to `path`. A symbolic link is kept.

    `permissions`: the file's permissions, regardless of an older file's permissions. By default, a new file
    gets the permissions that the umask allows, and a replaced file keeps its permissions.

    Raises:
        ConfigError: the folder is missing, its disk is full, or the file can't be written there.
    """
    target = check_writable(path)
    temporary = target.with_name(f".kvq-{secrets.token_hex(8)}")
    try:
        older = os.stat(target) if permissions is None and target.exists() else None
        first = permissions or (NEW if older is None else PRIVATE)
        with open(temporary, "xb", opener=partial(os.open, mode=first)) as file:
            if older is not None:
                keep_permissions(file.fileno(), older)
            file.write(content)
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(f"can't write {path}: {error.strerror or error}") from error
        raise


def keep_permissions(file: int | Path, older: os.stat_result) -> None:
    """Give a file the permissions and group of the file that it replaces, so that no one else can read it."""
    mode = older.st_mode & 0o777
    try:
        os.chown(file, older.st_uid if os.geteuid() == 0 else -1, older.st_gid)
    except OSError:  # this user is not in the old group, and another group must not get its permissions
        mode &= ~0o070
    os.chmod(file, mode)


def as_new(path: Path) -> None:  # D361: the mode that the umask allows; a replaced file keeps its mode
    """Give a file written by a library the permissions that a new file in its folder would get."""
    sample = path.with_name(f".kvq-{secrets.token_hex(8)}")
    try:
        os.close(os.open(sample, os.O_CREAT | os.O_EXCL, NEW))
        os.chmod(path, os.stat(sample).st_mode & 0o777)
    finally:
        sample.unlink(missing_ok=True)


def check_secret(path: str | Path) -> None:  # D328: owner only; root's group, as fsGroup has it
    """Raise ConfigError if anyone but the owner can read a file that contains a secret.

    The group may read the file if root owns it and this process does not run as root, which is how Kubernetes
    mounts secrets with `fsGroup`. PostgreSQL has the same rule for its keys.
    """
    with explained(ConfigError, f"{path} can't be read"):
        found = os.stat(path)
    allowed = 0o740 if found.st_uid == 0 != os.geteuid() else 0o700
    if found.st_mode & 0o777 & ~allowed:
        raise ConfigError(f"{path} can be read by others; run chmod 600 {path}")


def read_secret(path: str | Path, what: str, maker: str) -> bytes:
    """Read a secret key from a file: at least 16 bytes, as hexadecimal digits or as any text.

    White space around the key is left out. `what`, `maker`: for errors, the key's name and the command that
    makes one.

    Raises:
        ConfigError: the file doesn't exist, others can read it (`check_secret`), or the secret is too short.
    """
    with explained(ConfigError, f"{path} can't be read"), open(path, "rb") as file:
        secret = file.read(_MOST_SECRET + 1).strip()
    check_secret(path)
    if len(secret) > _MOST_SECRET:
        raise ConfigError(f"{path} is no {what}: a key has {_MOST_SECRET} bytes at most")
    if (length := _secret_bytes(secret)) < LEAST_SECRET:
        raise ConfigError(
            f"{path} holds a {what} of {length} bytes; {LEAST_SECRET} are needed: make one with {maker}"
        )
    return secret


def _secret_bytes(secret: bytes) -> int:
    """Return the length of a secret in bytes. Two hexadecimal digits count as one byte."""
    try:
        return len(bytes.fromhex(secret.decode("ascii")))
    except (ValueError, UnicodeDecodeError):
        return len(secret)


def check_writable(path: str | Path) -> Path:
    """Return the file that `path` resolves to, if it can be written. Call this before long work starts.

    Raises:
        ConfigError: the file can't be written: the folder doesn't exist, permission is denied, the
            name is too long, or the path is not a regular file.
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
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, a loop of links, a NUL
        raise ConfigError(f"can't write {path}: {getattr(error, 'strerror', None) or error}") from error
    if not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise ConfigError(f"can't write {path}: permission denied; choose another place")
    return target
