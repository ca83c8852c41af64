"""Watermark key: the secret that marks texts, and without which no mark is found."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvq.errors import ConfigError
from kvq.fileio import PRIVATE, check_secret

LEAST_BYTES = 16
_MOST_BYTES = 1 << 16  # a longer file is something else
_NEW_BYTES = 32


@dataclass(frozen=True, slots=True)
class Key:
    """32 secret bytes, which nothing shows. Equal only to itself."""

    _secret: bytes = field(repr=False)

    def word(self, tag: bytes, context: Sequence[int]) -> int:
        """Return 64 bits, a function of the key, a scheme and the tokens before a place.

        BLAKE2b with a key is a pseudo-random function: who learns the words of some contexts, such as from
        the texts themselves, learns nothing of other contexts' and nothing of the key.
        """
        tokens = np.asarray(context, dtype="<u4").tobytes()
        return int.from_bytes(blake2b(tokens, key=self._secret, person=tag, digest_size=8).digest(), "little")


def key_from(secret: bytes) -> Key:
    """Return the key of a file's bytes, without the blanks around them."""
    return Key(blake2b(secret.strip(), person=b"kvq-watermark", digest_size=32).digest())


def read_key(path: str | Path) -> Key:
    """Read a key from a file: 16 bytes or more, as hexadecimal digits or as any text.

    Raises:
        ConfigError: no such file, too short a secret in it, or others may read it (`check_secret`).
    """
    try:
        with open(path, "rb") as file:
            secret = file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    check_secret(path)
    if len(secret) > _MOST_BYTES:
        raise ConfigError(f"{path} is no watermark key: a key has {_MOST_BYTES} bytes at most")
    if (length := _secret_bytes(secret)) < LEAST_BYTES:
        raise ConfigError(
            f"{path} holds a watermark key of {length} bytes; {LEAST_BYTES} are needed: "
            f"make one with kvq detect-watermark --new-key FILE"
        )
    return key_from(secret)


def make_key(path: str | Path) -> None:
    """Write a new random key to a new file that only its owner can read.

    Raises:
        ConfigError: there is such a file, whose texts would never be found again, or none can be written.
    """
    try:
        with open(path, "xb", opener=partial(os.open, mode=PRIVATE)) as file:
            file.write(secrets.token_hex(_NEW_BYTES).encode() + b"\n")
    except FileExistsError as error:
        raise ConfigError(
            f"{path} is there already; texts marked with an overwritten key can't be found any more: "
            f"name a new file"
        ) from error
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror or error}") from error


def _secret_bytes(secret: bytes) -> int:
    """Return the bytes of a secret: two hexadecimal digits are one."""
    try:
        return len(bytes.fromhex(secret.decode("ascii")))
    except (ValueError, UnicodeDecodeError):
        return len(secret)
