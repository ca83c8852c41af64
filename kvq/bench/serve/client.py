"""Client that measures an OpenAI-compatible server."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from kvq.answers import read_address, read_event, read_model, read_refusal
from kvq.bench.engine.load import LoadRequest
from kvq.errors import EngineError

_TIMEOUT_S = 600.0
_LINE = 1 << 22  # bytes
_MAX_HEADERS = 200
_MAX_BODY = 1 << 30  # bytes
_MAX_DIGITS = 16  # in a size

# Disconnects a client after its first token instead of reading to the end
Leave = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Server to send requests to."""

    host: str
    port: int
    model: str
    key: str = "none"
    tls: ssl.SSLContext | None = None

    @classmethod
    def from_url(cls, url: str, key: str = "none") -> "Endpoint":
        """Return the endpoint for a URL such as http://127.0.0.1:8000.

        Raises:
            ConfigError: the URL is not an HTTP URL with a host.
        """
        address = read_address(url, ("http",))
        return cls(host=address.hostname or "", port=address.port or 80, model="", key=key)


@dataclass(slots=True)
class Sent:
    """Sent request with its outcome; times are in seconds on this process's clock."""

    request: LoadRequest
    due_s: float
    leave: Leave | None = None  # None: the client reads to the end
    status: int = 0  # 0: the connection broke before a response
    token_s: list[float] = field(default_factory=list)
    text: str = ""
    end_s: float = 0.0
    is_complete: bool = False  # every token and the end of the stream arrived
    error: str | None = None  # message of the error object


async def send(target: Endpoint, request: LoadRequest, due_s: float, leave: Leave | None = None) -> Sent:
    """Request a streamed completion; server errors are recorded rather than raised."""
    sent = Sent(request, due_s, leave)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await _exchange(target, sent)
    except EngineError as error:  # with the server's message
        sent.error = str(error)
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        sent.error = f"{type(error).__name__}: {error}"
    sent.end_s = perf_counter()
    return sent


async def get(target: Endpoint, path: str, *, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Send a GET request; return the status and body of the response.

    Raises:
        OSError: there is no connection; TimeoutError: no response in time; EOFError, ValueError: invalid
        response.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await _connect(target)
        try:
            writer.write(_head(target, "GET", path))
            status, headers = await _answer(reader)
            return status, b"".join([part async for part in _body(reader, headers)])
        finally:
            writer.close()


async def first_model(target: Endpoint) -> dict[str, Any]:
    """Return the first model listed at `/v1/models`; its `id` is a string.

    Raises:
        OSError, TimeoutError, EOFError, ValueError: as in `get`.
        EngineError: the server lists no models.
    """
    status, body = await get(target, "/v1/models")
    if status != 200:
        raise EngineError(f"it answers {status} when asked for them; does it need a key?")
    return read_model(body)


async def _exchange(target: Endpoint, sent: Sent) -> None:
    request = sent.request
    body = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "priority": request.priority.name.lower(),
    }
    payload = json.dumps(body).encode()
    reader, writer = await _connect(target)
    try:
        writer.write(_head(target, "POST", "/v1/completions", len(payload)) + payload)
        sent.status, headers = await _answer(reader)
        if sent.status != 200:
            text = b"".join([part async for part in _body(reader, headers)])
            sent.error = read_refusal(text, sent.status)
            return
        async for part in _body(reader, headers):
            _take(sent, part)
            if sent.leave is not None and sent.token_s:
                await sent.leave(reader, writer)
                return
    finally:
        writer.close()


async def _connect(target: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(target.host, target.port, limit=_LINE, ssl=target.tls)


def _head(target: Endpoint, method: str, path: str, length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {target.host}:{target.port}", "Connection: close"]
    lines.append(f"Authorization: Bearer {target.key}")
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    protocol, _, status = (await _line(reader)).partition(" ")
    if not protocol.startswith("HTTP/1.") or not status[:3].isdecimal():
        raise ValueError("the server does not speak HTTP")
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        if not (line := await _line(reader)):
            return int(status[:3]), headers
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    raise ValueError(f"the server sends more than {_MAX_HEADERS} headers")


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line:
        raise EOFError("the connection ended")
    return line.decode("latin-1").rstrip("\r\n")


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") != "chunked":
        yield await reader.readexactly(_size(headers.get("content-length", ""), 10))
        return
    num_bytes = 0
    while size := _size(await _line(reader), 16):
        num_bytes = _size(f"{num_bytes + size}", 10)
        yield await reader.readexactly(size)
        await reader.readexactly(2)


def _size(digits: str, base: int) -> int:
    """Parse the size of a body or a chunk, in bytes."""
    size = int(digits[:_MAX_DIGITS], base)
    if not 0 <= size <= _MAX_BODY:
        raise ValueError(f"an answer may have {_MAX_BODY} bytes")
    return size


def _take(sent: Sent, part: bytes) -> None:
    """Record one or more complete events."""
    now = perf_counter()
    for event in part.split(b"\n\n"):
        if event == b"data: [DONE]":
            sent.is_complete = len(sent.token_s) == sent.request.output_tokens
        elif event and (texts := read_event(event.removeprefix(b"data: "))[0]):
            sent.token_s.append(now)
            sent.text += texts[0]
