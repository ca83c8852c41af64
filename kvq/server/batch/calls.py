"""From a batch's line to its result: the server's own calls, tried again when the engine ends."""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

from pydantic import ValidationError

from kvq.errors import EngineError
from kvq.server.batch.lines import Line
from kvq.server.batch.turns import Turns
from kvq.server.bodies import ChatBody, CompletionBody
from kvq.server.chat import Chat
from kvq.server.completions import Completion
from kvq.server.logs import describe
from kvq.server.problems import Problem
from kvq.server.remote import State
from kvq.server.respond import Call
from kvq.server.service import Service

_log = logging.getLogger("kvq")
_URLS = ("/v1/chat/completions", "/v1/completions")
_MAY_HAVE_GRAMMAR = {"response_format", "guided_regex", "guided_choice", "guided_grammar", "tools"}
_GRAMMARS = 48  # side by side; the engine refuses requests when 64 grammars wait to be compiled
_TRIES = 3
_POLL_S = 0.05


class Calls:
    """Answers lines.

    What was running when the engine ended is tried again, each line alone: so one that ends the engine
    every time takes no others with it.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turns = Turns()
        self._grammars = asyncio.Semaphore(_GRAMMARS)

    async def answer(self, line: Line) -> dict[str, Any]:
        """The answer's body.

        Raises:
            Problem: the request can't be served, or failed, several times if that was not its own fault.
            EngineError: there will be no engine any more.
        """
        for again in range(_TRIES - 1):
            try:
                return await self._try(line, alone=again > 0)
            except Problem as problem:
                if problem.status not in (429, 503):
                    raise
                await asyncio.sleep(problem.retry_after_s or 0)
        return await self._try(line, alone=True)

    async def _try(self, line: Line, *, alone: bool) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            if _MAY_HAVE_GRAMMAR & line.body.keys():
                await stack.enter_async_context(self._grammars)
            await stack.enter_async_context(self._turns.alone() if alone else self._turns.beside())
            await self._until_ready()
            try:
                return await self._call(line).answer()
            except Problem:
                raise
            except Exception as error:  # one line's failure is not the others'
                _log.error("line %d failed: %s", line.number, describe(error))
                problem = Problem(500, f"kvq failed: {type(error).__name__}", type="server_error")
                raise problem from error

    async def _until_ready(self) -> None:
        remote = self._service.remote
        while remote.state is not State.READY:
            if remote.state in (State.FAILED, State.CLOSED):
                raise EngineError("there is no engine any more")
            await asyncio.sleep(_POLL_S)

    def _call(self, line: Line) -> Call:
        """Raises Problem: not a request that this server takes."""
        body = dict(line.body)
        if body.pop("stream", False):
            raise Problem(400, "a batch has no streams; leave stream out", param="stream")
        if body.get("priority") is None and body.get("service_tier") in (None, "auto"):
            body["priority"] = "batch"
        try:
            if line.url == "/v1/chat/completions":
                return Chat(self._service, ChatBody.model_validate(body), "")
            if line.url == "/v1/completions":
                return Completion(self._service, CompletionBody.model_validate(body), "")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise Problem(400, f"{where}: {first['msg']}", param=where) from error
        raise Problem(404, f"url must be one of {', '.join(_URLS)}, got {line.url[:100]!r}", param="url")
