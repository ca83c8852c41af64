"""Choice of a version: by weight, and the same one for all requests of a session."""

from collections.abc import Mapping
from hashlib import blake2b
from math import log
from typing import Any

import msgspec

_SESSION_HEADER = b"x-session-id"
_SESSION_FIELDS = ("session_id", "user", "safety_identifier")
_encoder = msgspec.msgpack.Encoder()


def choose_version(weights: Mapping[str, float], key: bytes) -> str | None:  # D426: rendezvous hashing
    """Return the version for a session's key, or None if no version has a weight.

    Every version draws a time from its own hash of the key, exponentially distributed with its weight as the
    rate, and the earliest wins. A change of weights moves only sessions from versions whose part shrinks to
    those whose part grows.

    Source: Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", SPAA 2005.
    """
    times = {one: -log(_uniform(key, one)) / weight for one, weight in weights.items() if weight > 0}
    return min(times, key=times.__getitem__, default=None)


def _uniform(key: bytes, version: str) -> float:
    digest = blake2b(key, digest_size=8, key=version.encode()[:64]).digest()
    return (int.from_bytes(digest) + 1) / ((1 << 64) + 1)


def session_key(tenant: str, headers: Mapping[bytes, bytes], body: Mapping[str, Any]) -> bytes:
    """Return what the requests of one session have in common, as a digest.

    That is the header x-session-id, a field that names the session or the user, or the conversation up to the
    first message of its user. A text completion without any of these is a session of its own.
    """
    parts: Any = headers.get(_SESSION_HEADER) or next(filter(None, map(body.get, _SESSION_FIELDS)), None)
    if parts is None:
        parts = _beginning(body.get("messages") or body.get("input") or body.get("prompt"))
    return blake2b(_encoder.encode((tenant, parts)), digest_size=16).digest()


def _beginning(given: Any) -> Any:
    """Return the messages of a conversation up to the first one of its user; anything else whole."""
    if isinstance(given, list):
        for at, message in enumerate(given):
            if isinstance(message, dict) and message.get("role") == "user":
                return given[: at + 1]
    return given
