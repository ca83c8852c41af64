"""Message frames: a four-byte little-endian length, followed by MessagePack."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from kvq.errors import EngineError
from kvq.server.engine.messages import FromEngine, ToEngine

T = TypeVar("T")
MAX_FRAME = 64 << 20  # bytes
_encoder = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    """Return an encoded message, preceded by its length.

    Raises:
        EngineError: the message is longer than MAX_FRAME.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME:
        raise EngineError(f"a message of {len(payload)} bytes; {MAX_FRAME} are allowed")
    return len(payload).to_bytes(4, "little") + payload


# D294: msgspec decodes declared types only, nothing executable
Decoder = msgspec.msgpack.Decoder  # decoder for the messages from one side
to_engine: Decoder[ToEngine] = Decoder(ToEngine)
from_engine: Decoder[FromEngine] = Decoder(FromEngine)


def read(sock: socket.socket, decoder: "Decoder[T]") -> T | None:
    """Return the next message from a blocking socket, or None at the end of the stream.

    Raises:
        EngineError: the message is invalid, too long or incomplete.
    """
    head = _receive(sock, 4)
    if not head:
        return None
    payload = _receive(sock, _length(head))
    if payload is None:
        raise EngineError("the other process ended within a message")
    return _decode(payload, decoder)


async def read_async(receive: Callable[[int], Awaitable[bytes]], decoder: "Decoder[T]") -> T | None:
    """Return the next message, or None if the stream ends, even within a message.

    `receive`: reads exactly that many bytes or raises IncompleteReadError, like asyncio's `readexactly`.

    Raises:
        EngineError: the message is invalid or too long.
    """
    try:
        payload = await receive(_length(await receive(4)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return _decode(payload, decoder)


def _decode(payload: bytes, decoder: "Decoder[T]") -> T:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineError(f"not a message of the other process: {error}") from error


async def receive(sock: socket.socket, count: int) -> bytes:
    """Return `count` bytes from a non-blocking socket.

    Raises:
        IncompleteReadError: the stream ends before `count` bytes arrive.
    """
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < count:
        part = await loop.sock_recv(sock, min(count - len(parts), 1 << 20))
        if not part:
            raise asyncio.IncompleteReadError(bytes(parts), count)
        parts += part
    return bytes(parts)


def _length(head: bytes) -> int:
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME:
        raise EngineError(f"a message of {length} bytes; {MAX_FRAME} are allowed")
    return length


def _receive(sock: socket.socket, count: int) -> bytes | None:
    """Return `count` bytes, b"" at the end of the stream, or None if the stream ends after fewer bytes."""
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None if parts else b""
        parts += part
    return bytes(parts)
