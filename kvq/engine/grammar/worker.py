"""The child process in which grammars are tried, and the compile that both sides run.

Some grammars never finish compiling, or take all memory, or overflow the stack, and a thread can't be
killed. So each is compiled here first: what passes within the limits is compiled again in the engine's
process, where it takes the same time and memory. Run as a script, with nothing imported but llguidance;
one JSON text a line goes each way, and a child whose parent is gone ends itself.
"""

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_SETUP_BYTES = 256 << 20  # a tokenizer of 250,000 tokens is 33 MB of JSON
MAX_REASON_CHARACTERS = 400
STACK_BYTES = 4 << 20  # half of a thread's usual stack: what fits here fits the engine's threads


def compile_grammar(tokenizer: LLTokenizer, text: str, limits: Mapping[str, Any]) -> LLMatcher:
    """Compile `text` and compute its first mask.

    Raises:
        ValueError: why llguidance refuses it, on one line.
    """
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False, **limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(reason(matcher))
    return matcher


def reason(matcher: LLMatcher) -> str:
    """Return what went wrong in a matcher, on one line and without its inner state."""
    text = " ".join(matcher.get_error().split("<non-verbose/>")[0].split())
    if text.startswith("NoExtension"):
        return "no text can match it"
    return text[:MAX_REASON_CHARACTERS] or matcher.stop_reason()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Read the setup, then try one grammar a line until the parent closes the pipe."""
    setup = json.loads(source.readline(MAX_SETUP_BYTES))
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"])
    _reply(sink, "")
    while line := source.readline(setup["max_line_bytes"]):
        # Of processor time, on which it dies: what a busy machine does meanwhile is no fault of the grammar.
        signal.setitimer(signal.ITIMER_PROF, setup["timeout_s"])
        limit_memory(setup["memory_bytes"])
        _reply(sink, _refusal(tokenizer, json.loads(line)["grammar"], setup["parser"]))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _refusal(tokenizer: LLTokenizer, text: str, limits: Mapping[str, Any]) -> str:
    try:
        compile_grammar(tokenizer, text, limits)
    except ValueError as error:
        return str(error)
    return ""


def limit_memory(extra_bytes: int) -> None:
    """Let the process take `extra_bytes` more address space than it has now; the rest aborts it."""
    if sys.platform != "linux":  # elsewhere the kernel doesn't keep this limit
        return
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard < 0 else min(soft, hard), hard))


def _reply(sink: BinaryIO, refusal: str) -> None:
    sink.write(json.dumps({"refusal": refusal}).encode() + b"\n")
    sink.flush()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
