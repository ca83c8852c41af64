"""Messages on a stream of bytes: four bytes of length, little-endian, then MessagePack."""

import asyncio
import socket
from typing import Generic, TypeVar

import msgspec

from kvq.errors import EngineError
from kvq.server.messages import FromEngine, Message, ToEngine

T = TypeVar("T")
MAX_FRAME = 64 << 20  # bytes
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """A message with its length.

    Raises:
        EngineError: it is longer than a frame may be.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME:
        raise EngineError(f"a message of {len(payload)} bytes; {MAX_FRAME} are allowed")
    return len(payload).to_bytes(4, "little") + payload


class Decoder(Generic[T]):
    """Reads messages of one side."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def read(self, sock: socket.socket) -> T | None:
        """The next message of a blocking socket; None at its end.

        Raises:
            EngineError: not a message of this side, too long, or cut off.
        """
        head = _receive(sock, 4)
        if not head:
            return None
        payload = _receive(sock, _length(head))
        if payload is None:
            raise EngineError("the other process ended within a message")
        return self.decode(payload)

    async def read_async(self, reader: asyncio.StreamReader) -> T | None:
        """The next message of a stream; None at its end, also within a message.

        Raises:
            EngineError: not a message of this side, or too long.
        """
        try:
            head = await reader.readexactly(4)
            payload = await reader.readexactly(_length(head))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return self.decode(payload)

    def decode(self, payload: bytes) -> T:
        """One message, without its length.

        Raises:
            EngineError: not a message of this side.
        """
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise EngineError(f"not a message of the other process: {error}") from error


def to_engine() -> Decoder[ToEngine]:
    """For the engine process."""
    return Decoder(ToEngine)  # type: ignore[arg-type]


def from_engine() -> Decoder[FromEngine]:
    """For the HTTP process."""
    return Decoder(FromEngine)  # type: ignore[arg-type]


async def ask(sock: socket.socket, message: bytes, decoder: Decoder[T]) -> T | None:
    """What the other end of a non-blocking socket answers to an encoded message; None if it ends instead.

    Raises:
        EngineError: not a message of that side, or too long.
    """
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, message)
        head = await _receive_async(sock, 4)
        payload = None if head is None else await _receive_async(sock, _length(head))
    except ConnectionError:
        return None
    return None if payload is None else decoder.decode(payload)


async def _receive_async(sock: socket.socket, count: int) -> bytes | None:
    """That many bytes; None if the stream ends before."""
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < count:
        part = await loop.sock_recv(sock, min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _length(head: bytes) -> int:
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME:
        raise EngineError(f"a message of {length} bytes; {MAX_FRAME} are allowed")
    return length


def _receive(sock: socket.socket, count: int) -> bytes | None:
    """That many bytes; empty at the end of the stream, None if it ends within them."""
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None if parts else b""
        parts += part
    return bytes(parts)
