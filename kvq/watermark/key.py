"""Watermark key: the secret for marking texts and detecting marks, and random words derived from it.

A token's word after a context is SplitMix64 of the context's word and the token. The sampler computes the
same words in torch (`kvq/engine/sampling/watermarks.py`); a test checks that they agree.

Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 16.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvq.errors import ConfigError
from kvq.fileio import PRIVATE, read_secret
from kvq.watermark.schemes import Green

_NEW_BYTES = 32
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GREEN_BITS = 32  # the highest bits of a word; they decide whether a token is green

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Key:
    """Secret of 32 bytes, which are never shown. A key is equal only to itself."""

    _secret: bytes = field(repr=False)

    def word(self, tag: bytes, context: Sequence[int]) -> int:
        """Return 64 bits that depend on the key, a scheme and the preceding tokens.

        BLAKE2b with a key is a pseudo-random function: anyone who learns the words of some contexts, for
        example from the texts, learns nothing about the key or the words of other contexts.
        """
        tokens = np.asarray(context, dtype="<u4").tobytes()
        return int.from_bytes(blake2b(tokens, key=self._secret, person=tag, digest_size=8).digest(), "little")


def key_from(secret: bytes) -> Key:
    """Derive a key from the content of a file, ignoring leading and trailing white space."""
    return Key(blake2b(secret.strip(), person=b"kvq-watermark", digest_size=32).digest())


def read_key(path: str | Path) -> Key:
    """Read a key from a file: at least 16 bytes, as hexadecimal digits or as any text.

    Raises:
        ConfigError: the file doesn't exist, others can read it (`check_secret`), or the secret is too short.
    """
    return key_from(read_secret(path, "watermark key", "kvq detect-watermark --new-key FILE"))


def make_key(path: str | Path) -> None:
    """Write a new random key to a new file that only its owner can read.

    Raises:
        ConfigError: the file can't be written, or already exists (replacing a key makes its marks
            undetectable).
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


def token_words(contexts: Words, tokens: npt.NDArray[np.integer]) -> Words:  # D264
    """Return the words of tokens. `contexts`: `Key.word` of each token's context, in a compatible shape."""
    words = contexts + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def green_bar(scheme: Green) -> int:
    """Return the exclusive upper bound for the highest 32 bits of a green token's word."""
    return int(scheme.gamma * (1 << GREEN_BITS))


def is_green(words: Words, scheme: Green) -> npt.NDArray[np.bool_]:
    """Return a mask of the green tokens, in the shape of their words."""
    return words >> np.uint64(64 - GREEN_BITS) < np.uint64(green_bar(scheme))


def layer_bits(words: Words, layers: int) -> npt.NDArray[np.uint8]:
    """Return the tokens' bits in a tournament's layers, [..., layers]; the lowest is for the first layer."""
    shifts = np.arange(layers, dtype=np.uint64)
    return (words[..., None] >> shifts & np.uint64(1)).astype(np.uint8)
