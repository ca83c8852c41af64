"""Batch calls: process a line as the server would, and retry the line if the engine ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from kvq.errors import EngineError, RequestError, not_one_of
from kvq.server.admission.bodies import ChatBody, CompletionBody
from kvq.server.admission.service import Service
from kvq.server.batch.lines import FIELDS, Line
from kvq.server.engine.remote import State
from kvq.server.http.body_errors import of_body
from kvq.server.http.ignored import safe_name, unknown_field
from kvq.server.http.problems import Problem
from kvq.server.logs import describe
from kvq.server.openai.chat import Chat
from kvq.server.openai.completions import Completions
from kvq.server.openai.respond import Call

_log = logging.getLogger("kvq")
Body = ChatBody | CompletionBody
_BODIES: dict[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
_MAY_HAVE_GRAMMAR = {"response_format", "structured_outputs", "tools"} | {
    f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")
}
_GRAMMARS = 48  # concurrent; the engine limits the grammars of a tenant that wait for compilation
_TRIES = 3  # D335: suspects are retried alone
_POLL_S = 0.05


class Calls:
    """Executor of a batch's calls.

    Lines that were running when the engine ended are retried, each alone: a line that always crashes the
    engine then does not fail the others.
    """

    def __init__(
        self, service: Service, on_ignored: Callable[[list[str]], object] = lambda names: None
    ) -> None:
        """`on_ignored` is called with the names of a line's ignored fields, for each line that has any."""
        self._service = service
        self._on_ignored = on_ignored
        self._room = _Room()
        self._grammars = asyncio.Semaphore(_GRAMMARS)

    async def answer(self, line: Line) -> dict[str, Any]:
        """Return the body of the response to a line.

        Raises:
            Problem: the request can't be served, or failed (repeatedly, if it did not cause the failure).
            EngineError: the engine ended and is not restarted.
        """
        body = await self._body(line)
        for again in range(_TRIES - 1):
            try:
                return await self._try(line, deepcopy(body), alone=again > 0)  # calls change it
            except Problem as problem:
                if problem.status not in (429, 503):
                    raise
                await asyncio.sleep(problem.retry_after_s or 0)
        return await self._try(line, body, alone=True)

    async def _try(self, line: Line, body: Body, *, alone: bool) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            if _MAY_HAVE_GRAMMAR & line.body.keys():
                await stack.enter_async_context(self._grammars)
            await stack.enter_async_context(self._room.enter(alone=alone))
            while (state := self._service.remote.state) is not State.READY:
                if state in (State.FAILED, State.CLOSED):
                    raise EngineError("there is no engine any more")
                await asyncio.sleep(_POLL_S)
            try:
                kind: Callable[..., Call] = Chat if isinstance(body, ChatBody) else Completions
                return await kind(self._service, body, "").answer()
            except Problem:
                raise
            except RequestError as error:
                raise Problem(400, str(error)) from error
            except Exception as error:  # one line's failure must not end the others
                _log.error("line %d failed: %s", line.number, describe(error))
                problem = Problem(500, f"kvq failed: {type(error).__name__}", type="server_error")
                raise problem from error

    async def _body(self, line: Line) -> Body:
        """Return the request body of a line; raise Problem if the body is invalid or has a refused field."""
        given = dict(line.body)
        if given.pop("stream", False):
            raise Problem(400, "a batch has no streams; leave stream out", param="stream")
        if given.get("priority") is None and given.get("service_tier") in (None, "auto"):
            given["priority"] = "batch"
        if (kind := _BODIES.get(line.url)) is None:
            raise Problem(404, not_one_of("url", line.url[:100], _BODIES), param="url")
        try:
            body = kind.model_validate(given)
        except ValidationError as error:
            raise of_body(error.errors(include_url=False), given) from error
        names = await self._service.check_fields(given, body)
        if line.unknown is not None:
            if self._service.is_strict:
                raise Problem(400, unknown_field(line.unknown, line.unknown, FIELDS), code="unknown_field")
            names.append(safe_name(line.unknown))
        if names:
            self._on_ignored(names)
        return body


class _Room:
    """Shared-exclusive lock; a task that waits for exclusive access has priority over later shared access."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_inside = 0
        self._num_alone = 0  # including waiting tasks

    @asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncIterator[None]:
        self._num_alone += alone
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not (self._num_inside if alone else self._num_alone))
                self._num_inside += 1
            try:
                yield
            finally:
                self._num_inside -= 1
        finally:
            self._num_alone -= alone
            async with self._changed:
                self._changed.notify_all()
