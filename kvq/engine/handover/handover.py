"""Hand-overs of an engine: prefixes and running requests that move to another engine, or come from one.

A thread for each transfer does the input and output. What concerns blocks and requests it asks of the
engine's thread, which does a bounded part of it between two steps. A request that moved keeps its listener
here: the other engine returns tokens. If that engine fails, the request goes on here.
"""

import logging
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue
from socket import SHUT_RDWR, socket
from time import sleep
from typing import Any, TypeVar

from kvq.engine.handover.link import Answer, Begin, Link, Tokens, listen, parse_address
from kvq.engine.handover.moving import Moving, MovingBlocks, facts_of, receive_blocks, send_blocks, unpack
from kvq.engine.requests.outputs import Event, Piece
from kvq.engine.requests.request_options import Prompt, RequestOptions, check_known, prompt_tokens
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.choose import as_known
from kvq.errors import ConfigError, EngineError, KVQError, OutOfBlocks, RequestError
from kvq.fileio import read_secret

_log = logging.getLogger("kvq")
T = TypeVar("T")
_SHARE = 0.1  # of the time of steps, while requests run
_IDLE_S = 0.02  # at once while none runs
_POLL_S = 0.01
_MOST_THREADS = 1024


class HandOver:  # D403: a request keeps its listener
    """Hand-overs of one engine. Methods that don't say otherwise are for the engine's thread."""

    def __init__(self, core: Any) -> None:
        """`core`: the `EngineCore` that has this object."""
        config, self._core = core.config, core
        self.wake: Callable[[], object] = lambda: None  # makes an idle engine call `advance`
        self.moves_all = False  # whether requests leave at once
        self.step_s = 0.0  # time of the last step
        path, given = config.hand_over_key_file, config.hand_over_to
        self._key = None if path is None else read_secret(path, "key of hand-overs", "openssl rand -hex 32")
        self._to = None if given is None else parse_address(given, self._key)
        self._facts, self._shape = facts_of(core)
        self._scheduler, self._blocks = core.scheduler, MovingBlocks(core)
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._away: dict[Job, Link] = {}  # requests that another engine computes, or is about to
        self._tried: set[Job] = set()
        self._arrived: dict[Job, Moving] = {}  # not in the queues yet
        self._links: set[Link] = set()
        self._threads: list[threading.Thread] = []
        self._lock, self._is_closed = threading.Lock(), False
        self.address = ""  # at which this engine listens
        self._listener = None
        if config.hand_over_listen is not None:
            self._listener = listen(parse_address(config.hand_over_listen, self._key))
            name = self._listener.getsockname()
            self.address = f"unix:{name}" if isinstance(name, str) else f"{name[0]}:{name[1]}"
            _log.info("listening for hand-overs at %s", self.address)
            self._start(self._accept_all, self._listener)

    def advance(self, *, is_free: bool = True) -> bool:
        """Do a bounded part of the work that waits, unless a step runs. Return False if there is none."""
        if self._to is not None and (self.moves_all or self._core.config.hand_over_prefilled):
            self._move_some()
        if not is_free:
            return not self._tasks.empty()
        clock, is_idle = self._core.intake.clock, not self._scheduler.running.requests
        until, did_work = clock() + (_IDLE_S if is_idle else _SHARE * self.step_s), False
        with suppress(Empty):
            while not did_work or clock() < until:
                work, future = self._tasks.get_nowait()
                did_work = True
                try:
                    future.set_result(work())
                except Exception as error:  # noqa: BLE001 - raised in the thread that asked
                    future.set_exception(error)
        return did_work

    def send_prefix(
        self, prompt: Prompt, *, tenant: str = "", cache_salt: str | None = None
    ) -> "Future[int]":
        """Send the cached prefix of a prompt, in whole blocks; the result is the number of its tokens.

        May be called from any thread; `LLM` sends while it runs steps. Raises ConfigError without an address.
        """
        if self._to is None:
            raise ConfigError("a prefix needs an engine to go to; give hand_over_to (--hand-over-to)")
        model, found = self._core.model, Future[int]()
        tokens = prompt_tokens(prompt, model.tokenizer, model.geometry.vocab_size)
        self._start(self._send_prefix, tokens, RequestOptions(tenant=tenant, cache_salt=cache_salt), found)
        return found

    def move_requests(self) -> None:
        """Let requests with one result go on in the other engine from now on; the results still come here.

        May be called from any thread.
        """
        self.moves_all = True
        self.wake()

    def recall(self, job: Job) -> None:
        """Queue a request again if it is away."""
        if (link := self._away.pop(job, None)) is not None:
            self._scheduler.num_away -= job.branches[0].sequence is not None
            self._blocks.put_back(job, self._core.intake.clock())
            link.abort()

    def enter(self, job: Job) -> bool:
        """Queue a request if another engine sent it. Raise KVQError if it can't go on from its tokens."""
        if (arrival := self._arrived.get(job)) is None:
            return False
        tokens, listener = unpack(arrival.begin)[job.prompt_length :], job.listener
        job.listener, job.max_tokens = None, self._scheduler.check(job)
        for token in tokens:
            if job.accept(0, token, None):
                raise RequestError("the request has ended already")
        job.listener = listener
        branch = self._blocks.take_over(job, tokens, self._core.intake.clock())
        branch.sequence, arrival.kv = arrival.kv, None
        self._scheduler.num_away -= branch.sequence is not None
        return True

    def forget(self, job: Job) -> None:
        """Free what is left of a request that ended."""
        self._tried.discard(job)
        if (arrival := self._arrived.pop(job, None)) is not None:
            self._blocks.drop(arrival)

    def close(self) -> None:
        """End all transfers and wait for their threads. Requests that are away return."""
        with self._lock:
            self._is_closed = True
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(SHUT_RDWR)
            self._listener.close()
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            for link in list(self._links):
                link.abort()
            with suppress(Empty):
                while True:
                    self._tasks.get_nowait()[1].set_exception(EngineError("the engine was closed"))
            alive[0].join(_POLL_S)
        for job in list(self._away):
            self.recall(job)
        for arrival in list(self._arrived.values()):
            self._blocks.drop(arrival)

    # In threads of their own

    def _start(self, work: Callable[..., object], *args: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, args=args, name="kvq-hand-over", daemon=True))
        self._threads[-1].start()

    def _call(self, work: Callable[..., T], *args: Any) -> T:  # D405: no credits
        """Let the engine's thread do something between two steps, and return the result."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise EngineError("the engine was closed")
            self._tasks.put((partial(work, *args), future))
        self.wake()
        return future.result()

    @contextmanager
    def _linked(self, link: Link, *, is_caller: bool) -> Iterator[Link]:
        with link:
            self._links.add(link)
            try:
                link.shake_hands(self._facts, self._key, is_caller=is_caller)
                yield link
            finally:
                self._links.discard(link)

    @contextmanager
    def _held(self, make: Callable[..., Moving], *args: Any) -> Iterator[Moving]:
        """Let the engine's thread make a sequence, and give up what is left of it in the end."""
        found = self._call(make, *args)
        try:
            yield found
        finally:
            with suppress(EngineError):
                self._call(self._give_up, found)

    def _send(self, link: Link, found: Moving) -> int:
        read = partial(self._call, self._blocks.read, found.kv)
        return send_blocks(link, found.begin, self._blocks.places(found.kv), self._shape, read)

    def _send_prefix(self, tokens: "array[int]", options: RequestOptions, found: "Future[int]") -> None:
        try:
            with (
                self._linked(Link.connect(self._to or ""), is_caller=True) as link,
                self._held(self._blocks.hold, tokens, options) as prefix,
            ):
                length = self._send(link, prefix)
            found.set_result(length)
        except (OSError, KVQError) as error:
            found.set_exception(error if isinstance(error, KVQError) else EngineError(f"hand-over: {error}"))

    def _send_request(self, job: Job) -> None:
        try:
            with self._linked(Link.connect(self._to or ""), is_caller=True) as link:
                self._send(link, self._call(self._detach, job, link))
                self._call(self._let_go, job)
                link.wait_forever()
                are_last = False
                while not are_last:
                    message = link.expect(Tokens)
                    self._call(self._accept, job, message)
                    are_last = message.are_last
        except (OSError, KVQError) as error:
            _log.warning("request %s goes on in this engine: %s", job.id, error)
        finally:
            with suppress(EngineError):
                self._call(self.recall, job)

    def _accept_all(self, listener: socket) -> None:
        while not self._is_closed:
            try:
                sock, _ = listener.accept()
            except OSError:  # closed, or no descriptor is left
                sleep(_POLL_S)
                continue
            if len(self._threads) < _MOST_THREADS:
                self._start(self._receive, Link(sock))
            else:
                sock.close()

    def _receive(self, link: Link) -> None:
        """Receive a sequence, and return the tokens of its request."""
        try:
            with self._linked(link, is_caller=False):
                begin, heard = link.expect(Begin), SimpleQueue[Event | None]()
                try:
                    with self._held(self._blocks.arrive, begin, heard.put) as arrival:
                        put = partial(self._call, self._blocks.put, arrival)
                        receive_blocks(link, begin, self._blocks.places(arrival.kv), self._shape, put)
                        link.send(Answer(self._call(self._conclude, arrival)))
                        if arrival.job is not None:
                            self._relay(link, heard)
                except (RequestError, ConfigError, OutOfBlocks) as error:
                    link.refuse(str(error))
        except (OSError, KVQError) as error:
            _log.warning("a hand-over from another engine ended: %s", error)

    def _relay(self, link: Link, heard: "SimpleQueue[Event | None]") -> None:
        """Send a request's tokens, until it ends or the sender ends the connection."""

        def watch() -> None:
            with suppress(OSError, KVQError):
                link.expect()
            heard.put(None)

        link.wait_forever()
        self._start(watch)
        last = Tokens([], None)
        while (event := heard.get()) is not None:
            if isinstance(event, Piece):
                last = Tokens(event.token_ids, event.logprobs)
                if event.finish_reason is None:
                    link.send(last)
            else:
                error = None if event.error is None else str(event.error)
                found = last if event.outputs[0].finish_reason in ("stop", "length") else Tokens([], None)
                digest = event.outputs[0].kv_digest
                link.send(Tokens(found.tokens, found.logprobs, True, digest, error))
                return

    # Between two steps

    def _move_some(self) -> None:
        """Begin to send requests with one text, except beams and prompts that need log-probabilities."""
        for job in list(self._core.jobs):
            is_due = self.moves_all or job.branches[0].num_generated > 0
            has_all = job.prompt_logprobs is None or len(job.prompt_logprobs) >= job.prompt_length
            can_move = has_all and job.num_branches == 1 and job.streams and not job.pools
            if is_due and can_move and job not in self._tried:
                self._tried.add(job)
                self._start(self._send_request, job)

    def _detach(self, job: Job, link: Link) -> Moving:
        if job not in self._core.jobs:
            raise EngineError("the request has ended")
        names = ("priority", "tenant", "shared_salt", "cache_salt")
        plain: dict[str, Any] = {"prompt_logprobs": None, "prompt_logprobs_start": 0, "echo": False}
        params = replace(job.params, max_tokens=job.max_tokens, most_tokens=None, **plain)
        options = RequestOptions(params=params, **{name: getattr(job, name) for name in names})
        branch = job.branches[0]
        self._core.release_row(branch)
        self._blocks.carry_out()
        self._blocks.detach(job)
        self._away[job], kv = link, branch.sequence
        self._scheduler.num_away += kv is not None
        length = 0 if kv is None else kv.length
        return Moving(Begin(branch.tokens.tobytes(), length, options, job.prompt_length, job.seed), kv, job)

    def _let_go(self, job: Job) -> None:
        """Free the blocks of a request that another engine has taken over."""
        if job in self._away and job.branches[0].sequence is not None:
            self._scheduler.num_away -= 1
            self._scheduler.running.drop(job)

    def _accept(self, job: Job, message: Tokens) -> None:
        """Add tokens that another engine returned to a request."""
        if job in self._away and message.tokens:
            check_known(message.tokens, self._core.model.geometry.vocab_size)
            job.mark_token(self._core.intake.clock())
        for token, entry in zip(message.tokens, message.logprobs or repeat(None), strict=False):
            if job not in self._away:  # it was cancelled, perhaps by its listener
                return
            job.branches[0].tokens.append(token)
            try:
                job.accept(0, token, entry)
            except Exception as error:  # noqa: BLE001 - a listener or tokenizer error affects only this request
                self._core.end(job, as_known(error), "error")
        if message.are_last and job in self._away:
            if not job.results[0].is_done:
                raise EngineError(message.error or "the other engine ended it early")
            job.results[0].output.kv_digest = message.kv_digest
            self._core.end(job, None, None)

    def _conclude(self, arrival: Moving) -> int:
        """Index a sequence whose blocks are complete, and let its request go on. Return its KV's tokens."""
        if arrival.kv is not None:
            self._scheduler.manager.commit(arrival.kv)
        kind = "prefix" if arrival.job is None else "request"
        _log.info(
            "took over a %s with KV of %d tokens", kind, 0 if arrival.kv is None else arrival.begin.length
        )
        if arrival.job is not None:
            self._arrived[arrival.job] = arrival
            self._core.submit(arrival.job)
        return arrival.begin.length

    def _give_up(self, moving: Moving) -> None:
        """End what has not ended."""
        if moving.job is not None:
            self._core.cancel(moving.job)
            self._arrived.pop(moving.job, None)
        self._blocks.drop(moving)
