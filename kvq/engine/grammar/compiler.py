"""Grammars compiled off the step loop, each tried in a child process first."""

import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from kvq.engine.grammar.limits import GrammarLimits
from kvq.engine.grammar.matcher import Grammar
from kvq.engine.grammar.process import CompileProcess
from kvq.engine.grammar.source import grammar_text
from kvq.engine.grammar.vocabulary import read_vocabulary
from kvq.engine.grammar.worker import compile_grammar
from kvq.engine.params import StructuredOutput
from kvq.errors import Overloaded, RequestError, first_lines


def check_structured(spec: StructuredOutput) -> None:
    """Raise RequestError if a spec's grammar is bad, too deep or too large; needs no model."""
    limits = GrammarLimits()
    _compile(LLTokenizer("byte"), grammar_text(spec, limits), limits)


class GrammarCompiler:
    """Compiles structured output for one model, on `workers` threads with a child process each.

    A grammar that passed in a child is remembered by its text, `limits.max_cached` of them, least
    recently used out first, and later compiled without the child. Refusals aren't remembered: a
    busy machine may have caused them.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        *,
        eos_ids: Sequence[int],
        limits: GrammarLimits | None = None,
        workers: int = 1,
    ):
        self.limits = limits or GrammarLimits()
        self._vocabulary = read_vocabulary(tokenizer, vocab_size, eos_ids)
        self._children = [CompileProcess(self._vocabulary, self.limits) for _ in range(workers)]
        self._idle: queue.SimpleQueue[CompileProcess] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="kvq-grammar")
        self._room = threading.BoundedSemaphore(self.limits.max_waiting)
        self._sound: OrderedDict[str, None] = OrderedDict()  # texts that passed, the oldest first
        self._lock = threading.Lock()

    def submit(self, spec: StructuredOutput) -> Future[Grammar]:
        """Compile `spec` on another thread; the future may be cancelled while it waits.

        It holds a RequestError if the grammar is bad, too deep, too large or too slow.

        Raises:
            Overloaded: `max_waiting` grammars wait already.
            RequestError: the compiler is closed.
        """
        if not self._room.acquire(blocking=False):
            raise Overloaded(
                f"structured output: {self.limits.max_waiting} grammars wait to be compiled; try again later"
            )
        try:
            future = self._threads.submit(self._compile, spec)
        except RuntimeError as error:  # the pool is shut down
            self._room.release()
            raise RequestError("structured output: the grammar compiler is closed") from error
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """End the children and cancel what waits. May be called again."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._close_children()
        self._threads.shutdown(wait=True)
        self._close_children()  # one may have started in between

    def _close_children(self) -> None:
        for child in self._children:
            child.close()

    def _compile(self, spec: StructuredOutput) -> Grammar:
        text = grammar_text(spec, self.limits)
        if not self._is_sound(text):
            self._try_in_child(text)
        return Grammar(self._vocabulary, _compile(self._vocabulary.tokenizer, text, self.limits))

    def _is_sound(self, text: str) -> bool:
        with self._lock:
            if text not in self._sound:
                return False
            self._sound.move_to_end(text)
            return True

    def _try_in_child(self, text: str) -> None:
        child = self._idle.get()
        try:
            child.check(text)
        finally:
            self._idle.put(child)
        with self._lock:
            self._sound[text] = None
            if len(self._sound) > self.limits.max_cached:
                self._sound.popitem(last=False)


def _compile(tokenizer: LLTokenizer, text: str, limits: GrammarLimits) -> LLMatcher:
    try:
        return compile_grammar(tokenizer, text, limits.parser)
    except ValueError as error:
        raise RequestError(f"structured output: {first_lines(error)}") from error
