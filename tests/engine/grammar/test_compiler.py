"""The compile runs elsewhere, ends in time, and one that doesn't harms no other."""

import gc
import os
import signal
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from contextlib import contextmanager

import pytest

from kvq.engine.grammar import compiler as compiler_module
from kvq.engine.grammar.compiler import GrammarCompiler, _CompileProcess
from kvq.engine.grammar.source import GrammarLimits
from kvq.engine.params import StructuredOutput
from kvq.errors import Overloaded, RequestError
from tests.engine.grammar.conftest import VOCAB_SIZE
from tests.engine.grammar.walks import accepts, matcher_of
from tests.waiting import HANG_S, wait_for

# An intersection whose emptiness llguidance decides without a limit of its own: minutes, at least
ENDLESS = "start: A\nA: /.*a.{15}.*/ & /.*b.{15}.*/ & /.*c.{15}.*/ & ~/.*d.{15}.*/"


@contextmanager
def compiler_with(tokenizer, **limits):
    made = GrammarCompiler(tokenizer, VOCAB_SIZE, eos_ids=[0], limits=GrammarLimits(**limits))
    try:
        yield made
    finally:
        made.close()


def stop(child):
    """Stop a child, and be sure of it: the signal is only on its way when it is sent."""
    child.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


@pytest.fixture
def tried(monkeypatch) -> list[str]:
    """Texts that went to a child."""
    texts: list[str] = []
    check = _CompileProcess.check

    def recorded(self, text):
        texts.append(text)
        return check(self, text)

    monkeypatch.setattr(_CompileProcess, "check", recorded)
    return texts


def test_a_compile_that_hangs_is_killed(tokenizer):
    with compiler_with(tokenizer, compile_timeout_s=1) as compiler:
        assert matcher_of(compiler, regex="a").mask().any()
        with pytest.raises(RequestError, match="more than 1 s of processor time"):
            matcher_of(compiler, lark=ENDLESS)
        assert accepts(compiler, tokenizer, "ab", regex="ab")


def test_a_compile_that_gets_no_processor_is_only_slow(tokenizer):
    with compiler_with(tokenizer, compile_timeout_s=1) as compiler:
        matcher_of(compiler, regex="a")
        child = compiler._child._child
        stop(child)
        made = compiler.submit(StructuredOutput(regex="ab"))
        with pytest.raises(TimeoutError):
            made.exception(0.6)
        child.send_signal(signal.SIGCONT)
        assert made.result(HANG_S).mask().any()


def test_a_compile_that_takes_no_processor_time_for_minutes_is_ended(tokenizer, monkeypatch):
    with compiler_with(tokenizer, compile_timeout_s=1) as compiler:
        matcher_of(compiler, regex="a")
        stop(compiler._child._child)
        monkeypatch.setattr(compiler_module, "_STUCK_S", 0)
        with pytest.raises(RequestError, match=r"more than 1 s;"):
            matcher_of(compiler, regex="ab")


def test_a_compile_that_takes_memory_is_ended(tokenizer):
    with compiler_with(tokenizer, compile_memory_bytes=24 << 20) as compiler:
        with pytest.raises(RequestError, match="24 MiB of memory"):
            matcher_of(compiler, json_schema={"type": "integer", "multipleOf": 999_983})
        assert accepts(compiler, tokenizer, "ab", regex="ab")


def test_a_child_that_died_is_replaced(tokenizer):
    with compiler_with(tokenizer) as compiler:
        matcher_of(compiler, regex="a")
        child = compiler._child._child
        child.kill()
        child.wait()
        assert accepts(compiler, tokenizer, "ab", regex="ab")


def test_nothing_is_compiled_in_the_callers_thread(tokenizer, monkeypatch):
    threads = []
    for name in ("grammar_text", "compile_grammar"):
        function = getattr(compiler_module, name)

        def recorded(*args, function=function):
            threads.append(threading.current_thread())
            return function(*args)

        monkeypatch.setattr(compiler_module, name, recorded)
    with compiler_with(tokenizer) as compiler:
        matcher_of(compiler, choice=["a", "b"])
    assert len(threads) == 2
    assert threading.current_thread() not in threads


def test_a_known_grammar_needs_no_child(tokenizer, tried):
    with compiler_with(tokenizer, max_cached=2) as compiler:
        for regex in ("a", "b", "a", "c"):  # c puts b out, a was used since
            matcher_of(compiler, regex=regex)
        assert len(tried) == 3
        matcher_of(compiler, regex="a")
        assert len(tried) == 3
        matcher_of(compiler, regex="b")
        assert len(tried) == 4
        assert len(compiler._sound) == 2


def test_a_refused_grammar_is_tried_again(tokenizer, tried):
    with compiler_with(tokenizer) as compiler:
        for _ in range(2):
            with pytest.raises(RequestError):
                matcher_of(compiler, regex="(")
        assert len(tried) == 2


def test_waiting_grammars_are_bounded_and_may_be_cancelled(tokenizer):
    with compiler_with(tokenizer, max_waiting=2, compile_timeout_s=1) as compiler:
        slow = compiler.submit(StructuredOutput(lark=ENDLESS))
        second = compiler.submit(StructuredOutput(regex="a"))
        with pytest.raises(Overloaded, match="2 grammars wait"):
            compiler.submit(StructuredOutput(regex="b"))
        assert second.cancel()
        third = compiler.submit(StructuredOutput(regex="c"))
        assert isinstance(slow.exception(HANG_S), RequestError)
        assert third.result(HANG_S).mask().any()


def test_close_ends_what_runs_and_what_waits(tokenizer):
    with compiler_with(tokenizer, compile_timeout_s=HANG_S) as compiler:
        matcher_of(compiler, regex="a")
        child = compiler._child._child
        running = compiler.submit(StructuredOutput(lark=ENDLESS))
        waiting = compiler.submit(StructuredOutput(regex="b"))
        wait_for(running.running, "the compile to begin")
        compiler.close()
        assert child.poll() is not None
        with pytest.raises(RequestError, match="closed"):
            running.result(HANG_S)
        with pytest.raises(CancelledError):
            waiting.result(HANG_S)
        with pytest.raises(RequestError, match="closed"):
            compiler.submit(StructuredOutput(regex="c"))


@pytest.mark.parametrize(("vocab_size", "eos_ids"), [(100, [0]), (4100, []), (4100, [4099])])
def test_a_vocabulary_that_does_not_fit_is_refused(tokenizer, vocab_size, eos_ids):
    with pytest.raises(RequestError, match=r"logits of 100|none that the tokenizer has is named"):
        GrammarCompiler(tokenizer, vocab_size, eos_ids=eos_ids)


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        GrammarCompiler(object(), VOCAB_SIZE, eos_ids=[0])


def test_tenants_take_turns_whoever_came_first(tokenizer):
    """What one has queued keeps the other waiting for one grammar at most."""
    with compiler_with(tokenizer, max_waiting=40) as compiler:
        done: list[str] = []
        gate = threading.Event()
        compile_one = compiler._compile

        def gated(spec):
            gate.wait()
            return compile_one(spec)

        compiler._compile = gated
        futures = []
        for i in range(20):
            futures.append(compiler.submit(StructuredOutput(regex=f"a{i}"), tenant="greedy"))
            futures[-1].add_done_callback(lambda _, i=i: done.append(f"greedy {i}"))
        wait_for(lambda: len(compiler._line) == 19, "the first to be at work")
        futures.append(compiler.submit(StructuredOutput(choice=["a"]), tenant="polite"))
        futures[-1].add_done_callback(lambda _: done.append("polite"))
        gate.set()
        for future in futures:
            future.result(HANG_S)
        assert done.index("polite") <= 1


def test_one_tenant_leaves_room_for_others(tokenizer):
    with compiler_with(tokenizer, max_waiting=8) as compiler:
        gate = threading.Event()
        compiler._compile = lambda spec: gate.wait()
        greedy = [compiler.submit(StructuredOutput(regex="a"), tenant="greedy") for _ in range(6)]
        assert not compiler.has_room("greedy")
        with pytest.raises(Overloaded, match="6 grammars wait to be compiled, 6 of them yours"):
            compiler.submit(StructuredOutput(regex="a"), tenant="greedy")
        others = [compiler.submit(StructuredOutput(regex="a"), tenant=name) for name in "ab"]
        assert not compiler.has_room("c")
        assert greedy[3].cancel()
        assert compiler.has_room("greedy")
        assert compiler.has_room("c")
        gate.set()
        for future in (*greedy[:3], *greedy[4:], *others):
            future.result(HANG_S)
        assert not compiler._num


def test_a_grammar_that_nobody_needs_is_freed_at_once(tokenizer):
    """Not when somebody looks for garbage: one may hold ten megabytes."""
    gc.collect()
    gc.disable()
    try:
        with compiler_with(tokenizer) as compiler:
            future = compiler.submit(StructuredOutput(regex="a+"))
            grammar = weakref.ref(future.result(HANG_S))
            del future
            wait_for(lambda: grammar() is None, "the grammar to be freed")
    finally:
        gc.enable()


def test_compiling_gives_way_to_steps(tokenizer):
    with compiler_with(tokenizer) as compiler:
        compiler.submit(StructuredOutput(regex="a+")).result(HANG_S)
        child, thread = compiler._child, compiler._thread
        assert os.getpriority(os.PRIO_PROCESS, child._child.pid) == compiler_module._NICENESS
        if sys.platform == "linux":
            assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == compiler_module._NICENESS
            assert (
                os.getpriority(os.PRIO_PROCESS, threading.main_thread().native_id) < compiler_module._NICENESS
            )
