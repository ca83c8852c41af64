"""Batch run: `kvq run-batch` from start to end."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

from kvq.errors import ConfigError, EngineError, KVQError
from kvq.models.describe.resolve import ModelSource
from kvq.models.loading.tokenizer import load_without_torch
from kvq.server.admission.admission import AdmissionConfig
from kvq.server.admission.config import ServerConfig
from kvq.server.assembly import make_remote, make_service
from kvq.server.batch.calls import Calls
from kvq.server.batch.lines import Line, encode_answer, encode_fault, read_lines
from kvq.server.batch.result_file import ResultFile
from kvq.server.http.problems import Problem
from kvq.server.logs import LogConfig

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
                await self._answer_all(Calls(service, self.summary.ignore), chain([first], lines))
            finally:
                self.summary.seconds = monotonic() - began
        except EngineError as error:
            reason = why_failed[-1] if why_failed else error
            raise EngineError(f"{reason}; run the same command again to go on") from error
        finally:
            await service.close()

    async def _answer_all(self, calls: Calls, lines: Iterator[Line | None]) -> None:
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

    async def _work(self, calls: Calls, lines: Iterator[Line | None]) -> None:
        for line in lines:
            if line is None:
                await asyncio.sleep(0)
                continue
            self.results.write(await self._result(calls, line))
            self.summary.num_new += 1
            self._show()

    async def _result(self, calls: Calls, line: Line) -> bytes:
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
