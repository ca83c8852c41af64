"""Chat partner on a server with an OpenAI-compatible API."""

import json
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from time import monotonic
from typing import IO, Any, NoReturn
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from kvq.answers import read_address, read_event, read_model, read_refusal
from kvq.commands.chat.partner import Answer, ChatSampling, ContextFull, Message, Show
from kvq.errors import ConfigError, EngineError, RequestError, first_lines

_TIMEOUT_S = 600.0  # without receiving a byte
_MAX_BYTES = 1 << 20  # limit of a non-streamed response, or of one event
_MAX_STREAM = 256 << 20  # bytes; a million tokens, each an event
_BROKEN = (OSError, HTTPException, ValueError, OverflowError)  # including a header that can't be sent
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServerPartner:
    """Running server with a base URL such as http://127.0.0.1:8000/v1; a URL without a path gets /v1."""

    def __init__(self, url: str, key: str | None, model: str | None, sampling: ChatSampling) -> None:
        """Connect to a server. `model`: name of the model, or None for the first model that the server lists.

        Raises:
            ConfigError: the URL is not an HTTP address.
            EngineError: the server can't be reached.
        """
        address = read_address(url, ("http", "https"))
        self._url = url.rstrip("/") + ("" if address.path.strip("/") else "/v1")
        self._key = key
        self._sampling = sampling
        self.name = model or self._first_model()

    def answer(self, messages: list[Message], show: Show) -> Answer:
        """Answer the last message; a KeyboardInterrupt closes the connection, which cancels the request.

        Raises:
            ContextFull: the server's context is full.
            RequestError: the server rejects the messages.
            EngineError: the server fails or can't be reached.
        """
        body = self._sampling.body() | {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, ttft_s = monotonic(), None
        usage = dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens"), 0)
        with self._open("/chat/completions", body) as response:
            for texts, used in _events(response):
                usage = used or usage
                for text in filter(None, texts):
                    ttft_s = ttft_s or monotonic() - began
                    show(text)
        total_s = monotonic() - began
        return Answer(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["cached_tokens"],
            generated_tokens=usage["generated_tokens"],
            ttft_s=total_s if ttft_s is None else ttft_s,
            total_s=total_s,
        )

    def close(self) -> None:
        """Do nothing, since no connection is kept open between answers."""

    def _first_model(self) -> str:
        with self._open("/models") as response:
            try:
                return str(read_model(response.read(_MAX_BYTES))["id"])
            except (EngineError, *_BROKEN) as error:
                raise ConfigError(
                    f"{self._url} lists no models: {first_lines(error)}; is it an OpenAI base URL?"
                ) from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> IO[bytes]:
        return open_url(self._url, path, self._key, body)


def open_url(url: str, path: str, key: str | None, body: dict[str, Any] | None = None) -> IO[bytes]:
    """Open a path below a server's base URL, with a POST request if there is a body.

    Raises:
        ConfigError: the URL is not an HTTP address.
        RequestError: the server refuses the request.
        EngineError: the server fails or can't be reached.
    """
    address = read_address(url, ("http", "https"))
    # Proxies in the environment are for other machines
    direct = [ProxyHandler({})] if address.hostname in _LOOPBACK else []
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url + path, None if body is None else json.dumps(body).encode(), headers)
    try:
        response: IO[bytes] = build_opener(_NoRedirects(), *direct).open(request, timeout=_TIMEOUT_S)
    except HTTPError as error:
        _refuse(error)
    except _BROKEN as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"{url} can't be reached: {first_lines(reason)}") from error
    return response


class _NoRedirects(HTTPRedirectHandler):
    """Handler that does not follow redirects, because the key must only be sent to the named server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _events(response: IO[bytes]) -> Iterator[tuple[tuple[str, ...], dict[str, int] | None]]:
    """Yield events up to [DONE]; raise EngineError if the stream is broken, too long or malformed."""
    num_bytes = 0
    try:
        while line := response.readline(_MAX_BYTES):
            num_bytes += len(line)
            if len(line) == _MAX_BYTES or num_bytes > _MAX_STREAM:
                raise EngineError(
                    f"the server's stream is too long: a line may have {_MAX_BYTES} bytes, all {_MAX_STREAM}"
                )
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield read_event(data)
    except _BROKEN as error:
        raise EngineError(f"the server's stream broke: {first_lines(error)}") from error
    raise EngineError("the server ended the stream before the answer was complete")


def _refuse(error: HTTPError) -> NoReturn:
    raw = b""
    with suppress(*_BROKEN), error:
        raw = error.read(_MAX_BYTES)
    message = read_refusal(raw, error.code)
    if error.code < 400:
        raise EngineError(f"the server redirects (HTTP status {error.code}); name the address it leads to")
    if error.code == 400 and "context" in message:
        raise ContextFull(message) from error
    if error.code < 500:
        raise RequestError(f"the server refused: {message}") from error
    raise EngineError(f"the server failed: {message}") from error
