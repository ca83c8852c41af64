"""Overflow: requests that this server refuses for its load go to another one, which the operator named.

The texts of these requests leave this machine, which is why nothing goes there unless it is configured.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import time
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2
import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvq.errors import ConfigError
from kvq.server.http.problems import OVERFLOWN, failed
from kvq.server.logs import log_event

PATHS = ("/v1/chat/completions", "/v1/completions")
_OWN = ("priority", "session_id", "kv_retain", "kv_format", "cache_salt", "watermark")  # fields of kvq alone
_DAY_S = 86400
_CONNECT_S = 5.0
_MOST_BYTES = 64 << 20  # of a response that is not streamed
_BYTES_PER_TOKEN = 4  # where an upstream tells no usage
_OUTCOMES = ("taken", "failed", "limited")
Answer = dict[str, Any] | AsyncGenerator[dict[str, Any]]  # whole, or its chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class OverflowConfig:
    """Upstream for refused requests, and what may go there.

    `url`: of its OpenAI-compatible API, such as https://host/v1. `takes`: requests with batch priority
    (service tier flex), or all. Requests that run when the day's tokens are used up go on to their end.

    Raises:
        ConfigError: the URL is none.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    model: str | None = None  # name there; None: the one in the request
    takes: Literal["batch", "all"] = "batch"
    max_concurrency: int = 16
    tokens_per_day: int = 1_000_000  # prompts and answers, by UTC day
    timeout_s: float = 600.0  # without a byte of the response

    def __post_init__(self) -> None:
        url = urlsplit(self.url)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise ConfigError(f"--overflow-to takes a URL such as https://host/v1, got {self.url!r}")


class Overflow:  # D432: only for load
    """Client of the upstream. It counts what it sends, and sends nothing beyond the limits."""

    def __init__(
        self, config: OverflowConfig, registry: CollectorRegistry, *, clock: Callable[[], float] = time
    ) -> None:
        self.config, self._clock = config, clock
        self.num_running = 0
        self._day, self._used = 0, 0
        headers = {OVERFLOWN: "1"} | ({} if config.key is None else {"Authorization": f"Bearer {config.key}"})
        timeout = httpx2.Timeout(config.timeout_s, connect=_CONNECT_S)
        self._client = httpx2.AsyncClient(
            headers=headers, timeout=timeout, follow_redirects=False, trust_env=False
        )
        self._requests = Counter(
            "kvq_overflow_requests",
            "Requests refused here that the upstream took, failed, or that the limits kept back.",
            ["outcome"],
            registry=registry,
        )
        for outcome in _OUTCOMES:
            self._requests.labels(outcome)
        self._tokens = Counter("kvq_overflow_tokens", "Tokens of the upstream.", ["kind"], registry=registry)
        for name, what, read in (
            ("kvq_overflow_running", "Requests at the upstream.", lambda: self.num_running),
            (
                "kvq_overflow_tokens_left",
                "Tokens that may go to the upstream today.",
                lambda: self.tokens_left,
            ),
        ):
            Gauge(name, what, registry=registry).set_function(read)

    @property
    def tokens_left(self) -> int:
        """Tokens of today's budget that are not used up."""
        self._begin_day()
        return max(0, self.config.tokens_per_day - self._used)

    async def take(self, path: str, raw: bytes, on_used: Callable[[int], object]) -> Answer | None:
        """Return the upstream's answer to a request, or None if it may not go there or is not answered.

        `raw`: the request's JSON. `on_used` is called with the request's tokens once it has ended.

        Raises:
            Problem: the upstream broke off within its answer.
        """
        body = await asyncio.to_thread(msgspec.json.decode, raw)
        is_batch = body.get("priority") == "batch" or body.get("service_tier") == "flex"
        if path not in PATHS or not (is_batch or self.config.takes == "all"):
            return None
        if self.num_running >= self.config.max_concurrency or not self.tokens_left:
            self._requests.labels("limited").inc()
            return None
        use = _Use(len(raw) // _BYTES_PER_TOKEN)
        async with AsyncExitStack() as stack:
            self.num_running += 1
            stack.callback(self._leave, use, on_used)
            try:
                response = await stack.enter_async_context(self._sent(path, body))
                is_fine, answer = response.status_code == 200, None
                if is_fine and not body.get("stream"):
                    answer = use.of(await _whole(response))
            except (httpx2.HTTPError, ValueError) as error:  # also of what is no JSON
                is_fine, answer = False, None
                log_event("overflow_failed", error=type(error).__name__)
            self._requests.labels("taken" if is_fine else "failed").inc()
            if not is_fine:
                use.forget()
                return None
            if answer is not None:
                return answer
            wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return _chunks(response, use, stack.pop_all(), wants_usage=wants_usage)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def _sent(self, path: str, body: dict[str, Any]) -> Any:
        given = {name: value for name, value in body.items() if name not in _OWN}
        if self.config.model is not None:
            given["model"] = self.config.model
        if given.get("stream"):
            given["stream_options"] = {**(given.get("stream_options") or {}), "include_usage": True}
        url = self.config.url.rstrip("/") + path.removeprefix("/v1")
        head = {"Content-Type": "application/json"}
        return self._client.stream("POST", url, content=msgspec.json.encode(given), headers=head)

    def _begin_day(self) -> None:
        today = int(self._clock() // _DAY_S)
        if today != self._day:
            self._day, self._used = today, 0

    def _leave(self, use: "_Use", on_used: Callable[[int], object]) -> None:
        self.num_running -= 1
        self._begin_day()
        self._used += use.prompt + use.completion
        self._tokens.labels("prompt").inc(use.prompt)
        self._tokens.labels("completion").inc(use.completion)
        on_used(use.prompt + use.completion)


@dataclass(slots=True)
class _Use:
    """Tokens of one request: estimates, until the upstream tells."""

    prompt: int
    completion: int = 0
    is_told: bool = False

    def of(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Read the usage in an answer or a chunk, and return it."""
        usage = answer.get("usage")
        if isinstance(usage, dict):
            self.prompt, self.completion = (
                int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")
            )
            self.is_told = True
        elif not self.is_told:
            self.completion += 1
        return answer

    def forget(self) -> None:
        """Count nothing for a request that the upstream did not answer."""
        self.prompt = self.completion = 0


async def _whole(response: httpx2.Response) -> dict[str, Any]:
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _MOST_BYTES:
            raise ValueError("the response is too large")
    return msgspec.json.decode(bytes(content), type=dict[str, Any])


async def _chunks(
    response: httpx2.Response, use: _Use, stack: AsyncExitStack, *, wants_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    async with stack:
        try:
            async for line in response.aiter_lines():
                name, _, data = line.partition(":")
                if name != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                chunk = use.of(msgspec.json.decode(data, type=dict[str, Any]))
                if chunk.get("choices") or wants_usage:
                    yield chunk
        except (httpx2.HTTPError, ValueError) as error:
            raise failed(f"the upstream of this server broke off: {type(error).__name__}") from error
        raise failed("the upstream of this server broke off")
