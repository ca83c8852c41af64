"""How failures and events look in the protocols that are spoken here, by the path."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvq.server.anthropic.errors import error_body, is_messages_path
from kvq.server.problems import Problem

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """One protocol's ways."""

    error: Callable[[Problem], dict[str, Any]]  # the error object
    event: Callable[[dict[str, Any]], bytes]  # a chunk or an error object as a server-sent event
    done: bytes  # what ends a complete stream


def dialect_of(path: str) -> Dialect:
    """What whoever asks at `path` expects."""
    return ANTHROPIC if is_messages_path(path) else OPENAI


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(body) + b"\n\n"


def _named(body: dict[str, Any]) -> bytes:
    return f"event: {body['type']}\n".encode() + _data(body)


OPENAI = Dialect(error=Problem.body, event=_data, done=b"data: [DONE]\n\n")
ANTHROPIC = Dialect(error=error_body, event=_named, done=b"")
