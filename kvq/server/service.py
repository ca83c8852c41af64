"""What the routes share: the engine, the tokenizer, and everybody who is being served."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from kvq.engine import SamplingParams
from kvq.errors import EngineError
from kvq.scheduler import Priority
from kvq.server.messages import Delta, Ended
from kvq.server.metrics import Metrics
from kvq.server.problems import Problem, failed, unavailable
from kvq.server.prompts import Prompts
from kvq.server.remote import Remote, State


class Service:
    """Requests in, the engine's messages out, while there is an engine and the server is not ending."""

    def __init__(self, name: str, remote: Remote, prompts: Prompts) -> None:
        """`name`: of the model, as clients see it."""
        self.name = name
        self.remote = remote
        self.prompts = prompts
        self.metrics = Metrics(remote)
        self.num_active = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def why_not_ready(self) -> str | None:
        """Why no request can be taken now."""
        if self._draining:
            return "the server is shutting down"
        if self.remote.state is not State.READY:
            return f"the engine is {self.remote.state.value}"
        return None

    def check_model(self, asked: str | None) -> None:
        """Raise Problem if a request is for another model."""
        if asked is not None and asked != self.name:
            raise Problem(
                404,
                f"no model {asked!r} here; this server has {self.name!r}",
                code="model_not_found",
                param="model",
            )

    async def stream(
        self, tokens: list[int], params: SamplingParams, *, priority: Priority, tenant: str
    ) -> AsyncGenerator[Delta | Ended]:
        """A request's messages up to its `Ended`, which has no error.

        Raises:
            Problem: it can't be served now, never, or failed.
        """
        if (reason := self.why_not_ready) is not None:
            self.metrics.count("refused")
            raise unavailable(reason)
        self.num_active += 1
        status = "cancelled"  # unless something else happens
        self._idle.clear()
        messages = self.remote.stream(tokens, params, priority=priority, tenant=tenant)
        try:
            async for message in messages:
                if isinstance(message, Ended):
                    status = ""  # counted by what it says
                    self.metrics.ended(message)
                    if message.error is not None:
                        is_theirs = message.kind == "request"
                        raise Problem(400, message.error) if is_theirs else failed(message.error)
                yield message
        except EngineError as error:
            status = "error"
            raise unavailable(str(error)) from error
        finally:
            if status:
                self.metrics.count(status)
            await messages.aclose()
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Take no new requests; return when the running ones ended, after `grace_s` at the latest."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)

    async def close(self) -> None:
        """End the engine; who still waits gets an error object."""
        await self.remote.close()
        self.prompts.close()


def describe(service: Service, created: int) -> dict[str, Any]:
    """The model, as `/v1/models` lists it."""
    info = service.remote.info
    limit = {} if info is None else {"max_model_len": info.max_context}
    return {"id": service.name, "object": "model", "created": created, "owned_by": "kvq"} | limit
