"""Grammar compiler: compiles grammars outside the step loop, trying each in a child process first."""

import os
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from kvq.engine.grammar.matcher import Matcher
from kvq.engine.grammar.process import NICENESS, CompileProcess
from kvq.engine.grammar.source import GrammarLimits, grammar_text
from kvq.engine.grammar.vocabulary import read_vocabulary
from kvq.engine.grammar.worker import as_lark, compile_grammar
from kvq.engine.params import StructuredOutput
from kvq.errors import Overloaded, RequestError, first_lines
from kvq.scheduler.fair_queue import FairQueue


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
        self,
        tokenizer: Any,
        vocab_size: int,
        *,
        eos_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ):
        self.limits = limits or GrammarLimits()
        self._vocabulary = read_vocabulary(tokenizer, vocab_size, eos_ids)
        self._child = CompileProcess(self._vocabulary, self.limits)
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
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
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
