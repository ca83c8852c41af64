"""Compile process: the engine's side of the child process in which grammars are tried."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from kvq.engine.grammar import worker
from kvq.engine.grammar.source import GrammarLimits
from kvq.engine.grammar.vocabulary import Vocabulary
from kvq.errors import RequestError

# D253: 5, in the server's session, or niceness has no effect
NICENESS = 5  # of compilation, so that steps have priority
START_TIMEOUT_S = 120  # Python, llguidance and a large tokenizer, on a busy machine
STUCK_S = 120  # for a child that neither replies nor uses processor time
MAX_REPLY_BYTES = 8 << 20  # a grammar may be up to six times as long in JSON


class CompileProcess:
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
        reply = self._exchange(child, {"grammar": text}, STUCK_S + self._limits.compile_timeout_s)
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
            self._exchange(self._child, self._setup(), START_TIMEOUT_S)
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
        os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
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
        return child.stdout.readline(MAX_REPLY_BYTES)
    except (OSError, ValueError):  # the pipe broke, or `close` closed it
        return b""
