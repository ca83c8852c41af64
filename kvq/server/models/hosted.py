"""One of several models: its service, its application, and its engine, started and stopped on demand."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from fastapi import FastAPI

from kvq.errors import KVQError
from kvq.models.describe.resolve import ModelSource
from kvq.server.admission.service import Service
from kvq.server.engine.remote import State
from kvq.server.http.problems import unavailable
from kvq.server.logs import log_event
from kvq.server.models.config import HostedModel

_log = logging.getLogger("kvq")
_RETRY_S = 30.0  # after a failed start, until a request starts the engine again
_STARTING_S = 10.0  # a guess until a start was measured


class Hosted:
    """Model of a server. Requests that need its engine start it; without requests, it stops after a while."""

    def __init__(self, given: HostedModel, source: ModelSource, service: Service, app: FastAPI) -> None:
        """`app`: the routes of `service`, without a guard."""
        self.entry, self.source, self.service, self.app = given.entry, source, service, app
        self.is_stopped = False  # by an operator: it gets no new requests
        self.num_requests = 0  # at the moment
        self._max_waiting = given.config.admission.max_queue
        self._max_wait_s = given.config.timeout_s
        self._num_waiting = 0  # requests for the start
        self._starting: asyncio.Task[None] | None = None
        self._start_s = _STARTING_S  # duration of the last start
        self._failed_s = -_RETRY_S
        self._why_failed = ""
        self._used_s = monotonic()
        service.remote.state = State.STOPPED

    @property
    def has_engine(self) -> bool:
        """True while there is an engine process, or will be one without a request."""
        return self.service.remote.state not in (State.STOPPED, State.FAILED, State.CLOSED)

    @property
    def why_unavailable(self) -> str | None:
        """Reason why a request would be refused now, or None, also if it would wait for a start."""
        if self.is_stopped:
            return f"{self.entry.name} was stopped by its operator"
        if monotonic() - self._failed_s < _RETRY_S:
            return f"{self.entry.name} failed: {self._why_failed}"
        return None if self.is_to_start else self.service.why_not_ready

    @contextmanager
    def using(self) -> Iterator[None]:
        """Count a request until its answer is complete."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._used_s = monotonic()

    @property
    def is_to_start(self) -> bool:
        """True if a request has to wait for a start. While an engine is restarted, the service refuses it."""
        return (self._starting is not None or not self.has_engine) and not self.service.is_draining

    async def wait_for_engine(self) -> bool:
        """Start the engine if it is stopped; return True when it has been started.

        Raises:
            Problem: the engine can't be started, or too many requests wait for it already (503).
        """
        if not self.is_to_start:
            return True
        name, retry_s = self.entry.name, max(1, round(self._start_s))
        if (why := self.why_unavailable) is not None and self._starting is None:
            raise unavailable(why, retry_after_s=round(_RETRY_S))
        if self._num_waiting >= self._max_waiting:
            raise unavailable(
                f"{name} is starting, and {self._num_waiting} requests wait for it already; try again later",
                retry_after_s=retry_s,
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await asyncio.shield(self.start())
            return True
        except TimeoutError as error:
            raise unavailable(f"{name} is still starting; try again later", retry_after_s=retry_s) from error
        except KVQError as error:
            raise unavailable(f"{name} can't be started: {error}", retry_after_s=round(_RETRY_S)) from error
        finally:
            self._num_waiting -= 1

    def start(self) -> "asyncio.Task[None]":
        """Return the task that starts the engine and the readers, a new one if none is running.

        The task raises KVQError if they can't be started.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return self._starting

    async def _start(self) -> None:
        began = monotonic()
        try:
            await asyncio.gather(self.service.remote.start(), self.service.prompts.start())
        except KVQError as error:
            self.note_failure(error)
            raise
        finally:
            self._starting = None
            self._used_s = monotonic()
        self._start_s = monotonic() - began
        log_event("model started", model=self.entry.name, seconds=self._start_s)

    def note_failure(self, error: KVQError) -> None:
        """Record that the engine failed for good; the other models go on."""
        if monotonic() - self._failed_s > 1:  # a failed start is reported by the engine, too
            _log.error("%s failed, the other models go on: %s", self.entry.name, error)
        self._failed_s, self._why_failed = monotonic(), str(error)

    async def stop_if_idle(self) -> None:
        """Stop the engine and the readers if there was no request for a while, and give their memory back."""
        idle_s, state = self.entry.idle_s, self.service.remote.state
        is_idle = idle_s is not None and not self.num_requests and monotonic() - self._used_s > idle_s
        if is_idle and state is State.READY:
            log_event("model stopped", model=self.entry.name, idle_s=idle_s)
            for prompts in (self.service.counting, self.service.prompts):
                prompts.stop()
            await self.service.remote.stop()

    async def close(self) -> None:
        """End the engine and the readers for good."""
        if self._starting is not None:
            self._starting.cancel()
            with suppress(asyncio.CancelledError, KVQError):
                await self._starting
        await self.service.close()
