"""Health checks: whether the server is alive, accepts requests, and actually generates tokens."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

from fastapi import FastAPI

from kvq.engine import SamplingParams
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import EngineError
from kvq.server.admission.prompts import PROBE
from kvq.server.admission.service import Service
from kvq.server.engine.messages import Ended
from kvq.server.http.problems import Problem, unavailable
from kvq.server.openai.openapi import answer
from kvq.version import __version__

_DEADLINE_S = 10.0
_FRESH_S = 5.0  # time for which a deep check's result is reused
_TOKENS = 10


class _DeepCheck:
    """Deep check: tokenizes a text and generates 10 tokens, with deadlines but without admission control."""

    def __init__(self, service: Service, *, clock: Callable[[], float] = monotonic) -> None:
        self._service = service
        self._clock = clock
        self._running: asyncio.Task[float] | None = None
        self._began_s = 0.0

    async def run(self) -> float:
        """Run the check, or reuse a result of the last five seconds; return the check's duration in seconds.

        Raises:
            Problem: no engine is running, or it did not generate in time.
        """
        self._service.check_ready()
        old = self._running
        if old is None or (old.done() and self._clock() - self._began_s > _FRESH_S):
            self._began_s = self._clock()
            self._running = asyncio.create_task(self._generate())
        assert self._running is not None
        return await asyncio.shield(self._running)

    async def _generate(self) -> float:
        began = self._clock()
        remote = self._service.remote
        room = remote.info.max_context - 1 if remote.info is not None else 1
        params = SamplingParams(max_tokens=min(_TOKENS, room), ignore_eos=True)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                if (reason := await self._service.prompts.probe()) is not None:
                    raise unavailable(reason)
                tokens = await self._service.prompts.tokenize("ping", tenant=PROBE)
        except TimeoutError as error:
            raise unavailable(f"no text was tokenized within {_DEADLINE_S:g} s") from error
        messages = remote.stream(tokens[:1] or [0], RequestOptions(params=params), timeout_s=_DEADLINE_S)
        try:
            async for message in messages:
                if isinstance(message, Ended) and message.error is not None:
                    raise unavailable(f"the engine failed a generation: {message.error}")
        except TimeoutError as error:
            raise unavailable(f"no {_TOKENS} tokens within {_DEADLINE_S:g} s") from error
        except EngineError as error:
            raise unavailable(str(error)) from error
        finally:
            await messages.aclose()
        return self._clock() - began


async def check_readiness(service: Service) -> None:  # D330: Kubernetes runs a command, since a key is needed
    """Raise Problem unless requests are accepted and prompts can be tokenized."""
    service.check_ready()
    if (reason := await service.prompts.probe()) is not None:
        raise unavailable(reason)


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the three `/health` routes, and `/version` as in vLLM."""
    deep = _DeepCheck(service)

    @app.get("/version", responses={200: {"model": dict[str, str]}})
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/health/live", responses=answer("Status"))
    async def live() -> dict[str, str]:
        return {"status": "live"}  # the event loop that responds also serves all requests

    @app.get("/health", responses=answer("Status"))
    @app.get("/health/ready", responses=answer("Status"))
    async def ready() -> dict[str, str]:
        await check_readiness(service)
        return {"status": "ready"}

    @app.get("/health/deep", responses=answer("Status"))
    async def generates() -> dict[str, Any]:
        try:
            return {"status": "generating", "seconds": await deep.run()}
        except Problem as problem:
            problem.retry_after_s = problem.retry_after_s or 1
            raise
