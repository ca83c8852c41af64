"""Grammar compiler: compiles grammars outside the step loop, trying each in a child process first."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from kvq.engine.grammar import worker
from kvq.engine.grammar.matcher import Matcher
from kvq.engine.grammar.source import GrammarLimits, grammar_text
from kvq.engine.grammar.vocabulary import Vocabulary, read_vocabulary
from kvq.engine.grammar.worker import as_lark, compile_grammar
from kvq.engine.params import StructuredOutput
from kvq.errors import Overloaded, RequestError, first_lines
from kvq.scheduler.fair_queue import FairQueue

# D253: 5, in the server's session, or niceness has no effect
_NICENESS = 5  # of compilation, so that steps have priority
_START_TIMEOUT_S = 120  # Python, llguidance and a large tokenizer, on a busy machine
_STUCK_S = 120  # for a child that neither replies nor uses processor time
_MAX_REPLY_BYTES = 8 << 20  # a grammar may be up to six times as long in JSON


def check_structured(spec: StructuredOutput) -> None:  # D251: once over bytes, before the weights
    """Raise RequestError if a spec's grammar is invalid, too deep or too large. No model is needed."""
    limits = GrammarLimits()
    _compile(LLTokenizer("byte"), grammar_text(spec, limits), limits)


class GrammarCompiler:  # D250: tried first in a child process, with a deadline and a memory limit
    """Compiler of structured output for one model. It uses a thread and a child process.

    Grammars that compiled in the child are cached by text (at most `limits.max_cached`, with LRU eviction)
    and later compiled without the child. Refusals are not cached, since a busy machine may have caused them.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, *, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ):
        self.limits = limits or GrammarLimits()
        self._vocabulary = read_vocabulary(tokenizer, vocab_size, eos_ids)
        self._child = _CompileProcess(self._vocabulary, self.limits)
        self._thread: threading.Thread | None = None  # created when it is needed
        self._line: FairQueue[Future[Matcher]] = FairQueue()
        # Specs by future. If a future's callback referred to an object with both, that would be a cycle, and
        # keep some megabytes of grammar alive until the next garbage collection.
        self._specs: dict[Future[Matcher], StructuredOutput] = {}
        self._num: Counter[str] = Counter()  # unfinished grammars by tenant
        self._changed = threading.Condition(threading.RLock())  # reentrant for callbacks of futures
        self._is_closed = False
        # Grammars that passed, by their text, as llguidance reads them; oldest first
        self._sound: OrderedDict[str, str] = OrderedDict()

    def has_room(self, tenant: str = "") -> bool:  # D252: fair queue; at most three quarters for one key
        """Return False if `submit` would refuse a grammar: too many are waiting, in total or for `tenant`."""
        with self._changed:
            return self._has_room(tenant)

    def submit(self, spec: StructuredOutput, *, tenant: str = "") -> Future[Matcher]:
        """Compile `spec` on another thread. The future may be cancelled while its grammar is queued.

        The future fails with a RequestError if the grammar is invalid, too deep, too large or too slow.
        Tenants are served fairly, by the compilation time of their grammars; one tenant may fill three
        quarters of the queue.

        Raises:
            Overloaded: too many grammars are already waiting.
            RequestError: the compiler is closed.
        """
        future: Future[Matcher] = Future()
        with self._changed:
            if self._is_closed:
                raise RequestError("structured output: the grammar compiler is closed")
            if not self._has_room(tenant):
                raise Overloaded(
                    f"structured output: {self._num.total()} grammars wait to be compiled, "
                    f"{self._num[tenant]} of them yours; try again later"
                )
            self._num[tenant] += 1
            self._line.put(tenant, future)
            self._specs[future] = spec
            if self._thread is None:
                self._thread = threading.Thread(target=self._work_off, name="kvq-grammar", daemon=True)
                self._thread.start()
            self._changed.notify()
        future.add_done_callback(partial(self._leave, tenant))
        return future

    def close(self) -> None:
        """End the child and cancel waiting grammars. May be called more than once."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        while (taken := self._take(wait=False)) is not None:
            taken[1].cancel()
        self._child.close()
        if self._thread is not None:
            self._thread.join()
        self._child.close()  # the child may have started in between

    def _has_room(self, tenant: str) -> bool:
        most = self.limits.max_waiting
        return self._num.total() < most and self._num[tenant] < -(-most * 3 // 4)

    def _leave(self, tenant: str, future: Future[Matcher]) -> None:
        with self._changed:
            self._line.remove(future)
            self._specs.pop(future, None)
            self._num[tenant] -= 1
            if not self._num[tenant]:
                del self._num[tenant]

    def _take(self, *, wait: bool = True) -> tuple[str, Future[Matcher]] | None:
        """Return the next job; None if the compiler is closed or, without waiting, if there is no job."""
        with self._changed:
            while wait and not self._line and not self._is_closed:
                self._changed.wait()
            return None if wait and self._is_closed else self._line.take()

    def _work_off(self) -> None:
        if sys.platform == "linux":  # where each thread has its own niceness
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (taken := self._take()) is not None:
            tenant, future = taken
            spec = self._specs.get(future)
            if not future.set_running_or_notify_cancel():
                continue
            assert spec is not None, "it is forgotten when its future ends"
            began = monotonic()
            try:
                future.set_result(self._compile(spec))
            except BaseException as error:  # noqa: BLE001 - stored in the future
                future.set_exception(error)
            del taken, future, spec  # otherwise they would live until the next job
            with self._changed:
                self._line.charge(tenant, monotonic() - began)

    def _compile(self, spec: StructuredOutput) -> Matcher:
        text = grammar_text(spec, self.limits)
        read = self._sound[text] = self._sound.get(text) or self._child.check(text)
        self._sound.move_to_end(text)
        if len(self._sound) > self.limits.max_cached:
            self._sound.popitem(last=False)
        return Matcher(self._vocabulary, _compile(self._vocabulary.tokenizer, read, self.limits))


def _compile(tokenizer: LLTokenizer, text: str, limits: GrammarLimits) -> LLMatcher:
    try:
        return compile_grammar(tokenizer, as_lark(text), limits.parser)
    except ValueError as error:
        raise RequestError(f"structured output: {first_lines(error)}") from error


class _CompileProcess:
    """Child process that tries one grammar at a time. It is killed and restarted if it exceeds a limit.

    Only one thread at a time may use the object, except for `close`.
    """

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits):
        self._vocabulary = vocabulary
        self._limits = limits
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, text: str) -> str:
        """Compile `text` in the child, and return it unchanged or, if it is GBNF, converted for llguidance.

        Raises:
            RequestError: the grammar is invalid, or takes more time or memory than the limits allow.
        """
        child = self._running()
        reply = self._exchange(child, {"grammar": text}, _STUCK_S + self._limits.compile_timeout_s)
        if reply["refusal"]:
            raise RequestError(f"structured output: {reply['refusal']}")
        return str(reply["grammar"])

    def close(self) -> None:
        """End the child, even while it is compiling; a pending `check` then raises an error."""
        self._closed = True
        self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._stop()
        self._check_open()
        if self._child is None:
            self._child = self._start()
            self._exchange(self._child, self._setup(), _START_TIMEOUT_S)
        return self._child

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("structured output: the grammar compiler is closed")

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-P", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a crash message would quote the request
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # arenas reserve address space, which is limited
            process_group=0,  # an interrupt at the terminal is meant for the engine alone
        )
        os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
        return child

    def _setup(self) -> dict[str, Any]:
        return {
            "tokenizer": self._vocabulary.tokenizer_json,
            "vocab_size": self._vocabulary.vocab_size,
            "eos_ids": self._vocabulary.eos_ids,
            "max_line_bytes": worker.MAX_SETUP_BYTES,
            "timeout_s": self._limits.compile_timeout_s,
            "memory_bytes": self._limits.compile_memory_bytes,
            "parser": self._limits.parser,
        }

    def _exchange(self, child: subprocess.Popen[bytes], message: dict[str, Any], timeout_s: float) -> Any:
        """Send one message and return the child's reply."""
        overran = threading.Event()

        def expire() -> None:
            overran.set()
            child.kill()

        deadline = threading.Timer(timeout_s, expire)
        deadline.daemon = True
        deadline.start()
        line = _ask(child, json.dumps(message).encode() + b"\n")
        deadline.cancel()
        deadline.join()
        if line.endswith(b"\n") and not overran.is_set():
            return json.loads(line)
        self._stop()
        self._check_open()
        limits = self._limits
        if child.returncode == -signal.SIGPROF:
            what = f"{limits.compile_timeout_s:g} s of processor time"
        elif overran.is_set():
            what = f"{timeout_s:g} s"
        else:
            what = f"{limits.compile_memory_bytes >> 20} MiB of memory, or crashes"
        raise RequestError(f"structured output: compiling takes more than {what}; simplify the grammar")

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in filter(None, (child.stdin, child.stdout)):
                with contextlib.suppress(OSError):  # unwritten bytes have no reader
                    pipe.close()


def _ask(child: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Return the child's next line, or part of a line if the child died."""
    assert child.stdin is not None, "the child was started with a pipe"
    assert child.stdout is not None, "the child was started with a pipe"
    try:
        child.stdin.write(line)
        child.stdin.flush()
        return child.stdout.readline(_MAX_REPLY_BYTES)
    except (OSError, ValueError):  # the pipe broke, or `close` closed it
        return b""
