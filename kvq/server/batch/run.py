"""Batch run: `kvq run-batch` from start to end."""

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import ValidationError

from kvq.errors import ConfigError, EngineError, KVQError, RequestError, not_one_of
from kvq.models.describe.resolve import ModelSource
from kvq.models.loading.tokenizer import load_without_torch
from kvq.server.admission.admission import AdmissionConfig
from kvq.server.admission.bodies import ChatBody, CompletionBody
from kvq.server.admission.config import ServerConfig
from kvq.server.admission.service import Service
from kvq.server.assembly import make_remote, make_service
from kvq.server.batch.lines import FIELDS, Line, encode_answer, encode_fault, read_lines
from kvq.server.batch.result_file import ResultFile
from kvq.server.engine.remote import State
from kvq.server.http.body_errors import of_body
from kvq.server.http.ignored import safe_name, unknown_field
from kvq.server.http.problems import Problem
from kvq.server.logs import LogConfig, describe
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


class _Calls:
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


Progress = Callable[[int, int | None], object]  # called with (finished lines, total lines or None if unknown)
_TOKENIZE_S = 600.0  # long, since many lines wait for the tokenizer at once
_BOUNDLESS = AdmissionConfig(  # max_in_flight limits the waiting requests
    max_queue=1 << 62, max_queued_tokens=1 << 62, max_wait_s=1e9, max_overcommit=1e9, max_kv_pressure=1.0
)
_NAMED = 8  # maximum number of ignored fields, and of reasons, that are listed
_AT_A_TIME = 1000  # finished lines skipped before other tasks run
_CHUNK = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Options of a batch run. `serving`: options of the model, its engine and request parsing."""

    source: Path
    target: Path
    serving: ServerConfig
    max_in_flight: int = 256  # lines
    retry_failed: bool = False

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ConfigError(f"max_in_flight must be at least 1, got {self.max_in_flight}")
        if not self.source.is_file():
            raise ConfigError(f"{self.source} is no file of requests; give one with a request on each line")
        if self.target.exists() and self.target.samefile(self.source):
            raise ConfigError(f"{self.target} holds the requests; name another file for the results")


@dataclass(kw_only=True, slots=True)
class Summary:
    """Statistics of a batch run."""

    num_new: int = 0  # lines finished by this run
    num_skipped: int = 0  # lines finished by earlier runs
    num_failed: int = 0  # results without a response, including those of earlier runs
    reasons: Counter[str] = field(default_factory=Counter)  # why requests of this run failed
    num_strangers: int = 0  # results of custom_ids that are not in the input
    num_ignoring: int = 0  # requests with fields that were ignored
    ignored: list[str] = field(default_factory=list)  # the first few ignored fields
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0  # time during which the engine was running
    is_complete: bool = False

    def ignore(self, names: list[str]) -> None:
        """Record the ignored fields of a request."""
        self.num_ignoring += 1
        for name in names:
            if name not in self.ignored and len(self.ignored) < _NAMED:
                self.ignored.append(name)

    def fail(self, reason: str) -> None:
        """Record a failed request; only the first few distinct reasons are kept."""
        self.num_failed += 1
        if reason in self.reasons or len(self.reasons) < _NAMED:
            self.reasons[reason] += 1

    def take(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.generated_tokens += usage["completion_tokens"]


def run_batch(
    config: BatchConfig,
    progress: Progress = lambda done, total: None,
    on_model: Callable[[ModelSource, str], object] = lambda source, digest: None,
) -> Summary:
    """Process all requests still without a result. SIGINT and SIGTERM end the run; a later run continues.

    `on_model` is called with the source of the loaded model and the digest of its tensors.

    Raises:
        ConfigError: a file can't be used, or the engine can't be built.
        EngineError: the engine ended too many times.
    """
    with ResultFile(config.target, retry_failed=config.retry_failed) as results:
        summary = Summary(num_failed=results.num_failed)
        return asyncio.run(_Batch(config, results, progress, on_model, summary).run())


@dataclass(slots=True, eq=False)
class _Batch:
    """State and tasks of one batch run."""

    config: BatchConfig
    results: ResultFile
    progress: Progress
    on_model: Callable[[ModelSource, str], object]
    summary: Summary
    total: int | None = None  # lines of the input

    async def run(self) -> Summary:
        work = asyncio.create_task(self._run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        with suppress(asyncio.CancelledError):
            await work
            self.summary.is_complete = True
            self.summary.num_strangers = self.results.num_strangers
        return self.summary

    async def _run(self) -> None:
        lines = self._unfinished()
        for first in lines:  # checked first, so that no engine is started for nothing
            if first is not None:
                break
            await asyncio.sleep(0)
        else:
            return
        why_failed: list[KVQError] = []
        config = replace(
            self.config.serving, admission=_BOUNDLESS, timeout_s=None, log=LogConfig(level="warning")
        )
        source, remote = make_remote(config, on_failed=why_failed.append)
        tokenizer = load_without_torch(source.folder, config.chat_template)
        service = make_service(config, source.name, source.folder, remote, tokenizer, deadline_s=_TOKENIZE_S)
        try:
            self.on_model(source, (await service.remote.start()).model_digest)
            began = monotonic()
            try:
                await self._answer_all(_Calls(service, self.summary.ignore), chain([first], lines))
            finally:
                self.summary.seconds = monotonic() - began
        except EngineError as error:
            reason = why_failed[-1] if why_failed else error
            raise EngineError(f"{reason}; run the same command again to go on") from error
        finally:
            await service.close()

    async def _answer_all(self, calls: _Calls, lines: Iterator[Line | None]) -> None:
        """Process lines with `max_in_flight` workers; each worker takes the next line when it is free."""
        try:
            async with asyncio.TaskGroup() as group:
                counting = group.create_task(self._count())
                workers = [
                    group.create_task(self._work(calls, lines)) for _ in range(self.config.max_in_flight)
                ]
                await asyncio.wait(workers)
                counting.cancel()
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from errors

    async def _work(self, calls: _Calls, lines: Iterator[Line | None]) -> None:
        for line in lines:
            if line is None:
                await asyncio.sleep(0)
                continue
            self.results.write(await self._result(calls, line))
            self.summary.num_new += 1
            self._show()

    async def _result(self, calls: _Calls, line: Line) -> bytes:
        if line.fault is not None:
            self.summary.fail(line.fault)
            return encode_fault(line)
        try:
            body = await calls.answer(line)
        except Problem as problem:
            self.summary.fail(f"{problem.status} {problem.message}")
            return encode_answer(line, problem.body(), problem.status)
        self.summary.take(body["usage"])
        return encode_answer(line, body)

    def _unfinished(self) -> Iterator[Line | None]:
        """Yield the unfinished lines, and None at intervals while finished lines are skipped."""
        for given in read_lines(self.config.source):
            line = self.results.unfinished(given)
            if line is not None:
                yield line
                continue
            self.summary.num_skipped += 1
            if self.summary.num_skipped % _AT_A_TIME == 0:
                self._show()
                yield None

    def _show(self) -> None:
        self.progress(self.summary.num_new + self.summary.num_skipped, self.total)

    async def _count(self) -> None:
        """Count the lines of the input for the progress bar."""
        count = 0
        with self.config.source.open("rb") as file:
            while chunk := file.read(_CHUNK):
                count += chunk.count(b"\n")
                await asyncio.sleep(0)
        self.total = count
        self._show()


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group, which caused the other tasks to be cancelled."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
