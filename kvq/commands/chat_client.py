"""A chat partner elsewhere: a server that speaks OpenAI's protocol."""

import json
from collections.abc import Iterator
from time import monotonic
from typing import IO, Any, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from kvq.commands.chat_partner import Answered, ContextFull, Sampling, Show, Turn
from kvq.errors import ConfigError, EngineError, RequestError, first_lines

_TIMEOUT_S = 600.0  # without a byte
_MAX_BYTES = 1 << 20  # of an answer that is no stream, or of one event
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServerPartner:
    """A running server, by its base URL such as http://127.0.0.1:8000/v1; without a path, /v1 is meant."""

    def __init__(self, url: str, key: str | None, model: str | None, sampling: Sampling) -> None:
        """`model` None: the first that the server has.

        Raises:
            ConfigError: not an http address.
            EngineError: nobody answers there.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000/v1, got {url!r}")
        self._url = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        self._key = key
        self._sampling = sampling
        self._opener = _opener(parts.hostname)
        self.name = model or self._first_model()

    def answer(self, turns: list[Turn], show: Show) -> Answered:
        """Answer the last turn; a KeyboardInterrupt closes the connection, on which servers cancel.

        Raises:
            ContextFull: the server says so.
            RequestError: the server refuses the turns.
            EngineError: it fails, or can't be reached.
        """
        body = self._sampling.body() | {
            "model": self.name,
            "messages": turns,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, ttft_s = monotonic(), None
        usage: dict[str, Any] = {}
        with self._open("/chat/completions", body) as answer:
            for event in _events(answer):
                if "error" in event:
                    raise EngineError(_message(event))
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    if text := choice.get("delta", {}).get("content"):
                        ttft_s = ttft_s or monotonic() - began
                        show(text)
        total_s = monotonic() - began
        return Answered(
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            generated_tokens=usage.get("completion_tokens", 0),
            ttft_s=total_s if ttft_s is None else ttft_s,
            total_s=total_s,
        )

    def close(self) -> None:
        """Nothing is held between answers."""

    def _first_model(self) -> str:
        with self._open("/models") as answer:
            try:
                return str(json.loads(answer.read(_MAX_BYTES))["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise ConfigError(f"{self._url} lists no models; is it an OpenAI base URL?") from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> IO[bytes]:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        raw = None if body is None else json.dumps(body).encode()
        try:
            answer: IO[bytes] = self._opener.open(Request(self._url + path, raw, headers), timeout=_TIMEOUT_S)
        except HTTPError as error:
            _refuse(error)
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(f"{self._url} can't be reached: {first_lines(reason)}") from error
        return answer


class _NoRedirects(HTTPRedirectHandler):
    """The key is for the server that was named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _opener(host: str) -> OpenerDirector:
    """Proxies of the environment are for other machines."""
    return build_opener(_NoRedirects(), *([ProxyHandler({})] if host in _LOOPBACK else []))


def _events(answer: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Server-sent events up to [DONE].

    Raises:
        EngineError: the stream broke off, or is something else.
    """
    try:
        while line := answer.readline(_MAX_BYTES):
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ValueError("not an object")
                yield event
                if "error" in event:
                    return
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"the server's stream broke: {first_lines(error)}") from error
    raise EngineError("the server ended the stream before the answer was complete")


def _refuse(error: HTTPError) -> NoReturn:
    with error:
        raw = error.read(_MAX_BYTES)
    try:
        message = _message(json.loads(raw))
    except (ValueError, RecursionError):
        message = f"HTTP status {error.code}"
    if error.code == 400 and "context" in message:
        raise ContextFull(message) from error
    if error.code < 500:
        raise RequestError(message) from error
    raise EngineError(message) from error


def _message(body: Any) -> str:
    """Of an error object, whoever's it is."""
    found = body.get("error", body) if isinstance(body, dict) else body
    message = found.get("message") if isinstance(found, dict) else None
    return first_lines(
        Exception(message if isinstance(message, str) else "the server refused, without a reason")
    )
