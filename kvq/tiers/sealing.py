"""Sealing: the names under which blocks are stored, and their encryption, both from an operator's key.

Without a key, a name is a digest that anyone who knows the model and a prompt can compute, and blocks are
stored as they are. With a key, every tenant has keys derived from it: nobody without the key can tell which
prompts are stored, read them, or write a block that would be accepted.
"""

import hmac
import os
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from kvq.errors import DamagedData
from kvq.extras import ENCRYPTION, require
from kvq.fileio import read_secret

_NONCE_BYTES = 12


class Sealing:
    """Names of blocks, and their bytes as stored."""

    is_encrypted = False

    def name(self, owner: str, digest: bytes, group: int) -> bytes:
        """Return the 32-byte name of an owner's block. `digest`: of its tokens, from the prefix index."""
        return sha256(b"kvq block" + digest + group.to_bytes(2, "little")).digest()

    def owner_tag(self, owner: str) -> bytes:
        """Return 16 bytes that stand for an owner in files."""
        return blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def close(self, owner: str, name: bytes, content: Any) -> Any:
        """Return a block's bytes as they are stored."""
        return content

    def open(self, owner: str, name: bytes, content: Any) -> Any:
        """Return a block's bytes from the stored ones. Raise DamagedData if they can't be trusted."""
        return content


class _Keyed(Sealing):  # D398
    """Names by HMAC-SHA256, and encryption by AES-256-GCM, with keys of every owner."""

    is_encrypted = True

    def __init__(self, secret: bytes) -> None:
        self._secret = blake2b(secret, person=b"kvq-tiers", digest_size=32).digest()
        self._keys = lru_cache(4096)(self._make_keys)

    def name(self, owner: str, digest: bytes, group: int) -> bytes:
        return hmac.digest(self._keys(owner)[0], digest + group.to_bytes(2, "little"), "sha256")

    def owner_tag(self, owner: str) -> bytes:
        return self._derive(b"tag", owner)[:16]

    def close(self, owner: str, name: bytes, content: Any) -> Any:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._keys(owner)[1].encrypt(nonce, content, name)

    def open(self, owner: str, name: bytes, content: Any) -> Any:
        from cryptography.exceptions import InvalidTag

        stored = memoryview(content)
        try:
            return self._keys(owner)[1].decrypt(bytes(stored[:_NONCE_BYTES]), stored[_NONCE_BYTES:], name)
        except (InvalidTag, ValueError) as error:
            raise DamagedData("it was not encrypted with this key") from error

    def _make_keys(self, owner: str) -> tuple[bytes, Any]:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return self._derive(b"name", owner), AESGCM(self._derive(b"cipher", owner))

    def _derive(self, use: bytes, owner: str) -> bytes:
        return hmac.digest(self._secret, use + b"\0" + owner.encode("utf-8", "surrogatepass"), "sha256")


def keyed_sealing(path: str | Path) -> Sealing:
    """Return a sealing with the operator's key in a file.

    Raises:
        ConfigError: the file is missing, can be read by others or holds too short a key, or the package for
            encryption is missing.
    """
    require("an encrypted kv_dir (--kv-key-file)", ENCRYPTION)
    return _Keyed(read_secret(path, "key for stored KV", "openssl rand -hex 32 > FILE; chmod 600 FILE"))
