"""Grammar worker: the child process that tries grammars, and the compilation that both processes run.

Some grammars never finish compiling, use all memory or overflow the stack, and a thread can't be killed.
Each grammar is therefore compiled here first; if it passes within the limits, it is compiled again in the
engine's process, which takes the same time and memory. This module runs as a script that imports only
llguidance. In both directions, each message is one line of JSON. The child exits when its parent is gone.
"""

import json
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from time import thread_time
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

MAX_SETUP_BYTES = 256 << 20  # a tokenizer of 250,000 tokens is 33 MB of JSON
MAX_REASON_CHARACTERS = 400
STACK_BYTES = 4 << 20  # half of a thread's usual stack: what fits here fits the engine

_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_SHORT = re.compile(r"(?<!\\)\\u(0[0-9a-fA-F]{3})")  # the conversion loses the 0
_WAY = " while processing "  # llguidance's text before a reference
_LOOKS_S = 0.5  # time to locate an error in a schema
_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # keyed by name
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_REMEDIES = {  # by a part of llguidance's reason
    "oneOf": "parts of oneOf may overlap; write anyOf, or give each a property with a const of its own",
    " range: min": "bounds so far from 0 can't be held; leave them out, or stay within 2**53 - 1",
    "Unimplemented keys": "can't be enforced here; leave them out",
    "look": "a pattern can't look around or name edges of words; write what stands there",
}


def as_lark(text: str) -> str:
    """Return the grammar with any parts in GBNF (llama.cpp's grammar language) converted to Lark.

    Raises:
        ValueError: a part is not valid GBNF.
    """
    if "::=" not in text:
        return text
    if found := parts(text):
        read = [part | {"lark_grammar": as_lark(part.get("lark_grammar") or "") or None} for part in found]
        return json.dumps({"grammars": read})
    text = _SHORT.sub(lambda m: chr(code) if (code := int(m[1], 16)) > 0x9F else f"\\x{m[1][2:]}", text)
    try:
        return gbnf_to_lark(text) if _GBNF.search(text) else text
    except Exception as error:  # the library's errors have no common base class
        raise ValueError(f"read as GBNF: {error}") from error


def parts(text: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar written as JSON, or an empty list for any other grammar."""
    try:
        found = json.loads(text)["grammars"] if text.startswith('{"grammars"') else []
        return [part for part in found if isinstance(part, dict)]
    except (ValueError, TypeError):
        return []


def places(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the direct subschemas of a schema, each with its path."""
    for key, inner in schema.items():
        if key in _SINGLE and isinstance(inner, dict):
            yield f"/{key}", inner
        elif key in _SCHEMAS and isinstance(inner, dict):
            yield from ((f"/{key}/{name}", one) for name, one in inner.items() if isinstance(one, dict))
        elif key in _LISTS and isinstance(inner, list):
            yield from ((f"/{key}/{i}", one) for i, one in enumerate(inner) if isinstance(one, dict))


def explained(tokenizer: LLTokenizer, text: str, why: str) -> str:
    """Return a refusal with its place in a JSON schema and a remedy, or with the supported languages."""
    grammars = parts(text)
    schema = next(
        (part["json_schema"] for part in grammars if isinstance(part.get("json_schema"), dict)), None
    )
    if schema is None:
        is_ours = any(part.get("name") == "regex" for part in grammars)
        known = 'a grammar is read as Lark, such as start: "a" | "b", or as GBNF, such as root ::= "a" | "b"'
        return why if is_ours else f"{why}; {known}"
    shared = {key: schema[key] for key in ("x-guidance", "$defs", "definitions") if key in schema}
    place, began, is_deeper, why = "#", thread_time(), True, why.partition(_WAY)[0]
    while is_deeper:
        is_deeper = False
        for way, inner in places(schema):
            grammar = json.dumps({"grammars": [{"json_schema": shared | inner}]})
            found = thread_time() - began < _LOOKS_S and reason(LLMatcher(tokenizer, grammar, log_level=0))
            if found and found.partition(_WAY)[0] == why:
                place, schema, is_deeper = place + way, inner, True
                break
    remedy = next((words for start, words in _REMEDIES.items() if start in why), "")
    keys = why.partition(": ")[2] + " " if why.startswith("Unimplemented") else ""
    return f"json_schema at {place}: " + (keys + remedy if remedy else why)


def compile_grammar(tokenizer: LLTokenizer, text: str, limits: Mapping[str, Any]) -> LLMatcher:
    """Compile `text` and compute its first mask.

    Raises:
        ValueError: llguidance refuses the grammar; the message is the reason, on one line.
    """
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False, **limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(explained(tokenizer, text, reason(matcher)))
    return matcher


def reason(matcher: LLMatcher) -> str:
    """Return a matcher's error message on one line, without llguidance's internal state."""
    text = " ".join(matcher.get_error().split("<non-verbose/>")[0].split())
    if text.startswith("NoExtension"):
        return "no text can match it"
    return text[:MAX_REASON_CHARACTERS] or matcher.stop_reason()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Read the setup, then try one grammar per line until the parent closes the pipe."""
    setup = json.loads(source.readline(MAX_SETUP_BYTES))
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"])
    _reply(sink, "")
    while line := source.readline(setup["max_line_bytes"]):
        # The limit, which kills the process, is in processor time: a busy machine is not the grammar's fault.
        signal.setitimer(signal.ITIMER_PROF, setup["timeout_s"])
        limit_memory(setup["memory_bytes"])
        _reply(sink, *_tried(tokenizer, json.loads(line)["grammar"], setup["parser"]))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _tried(tokenizer: LLTokenizer, text: str, limits: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reason for a refusal (empty if accepted), and the grammar as llguidance reads it."""
    try:
        text = as_lark(text)
        compile_grammar(tokenizer, text, limits)
    except ValueError as error:
        return str(error), ""
    return "", text


def limit_memory(extra_bytes: int) -> None:
    """Limit the address space to `extra_bytes` beyond its current size; exceeding this aborts the process."""
    if sys.platform != "linux":  # other kernels don't enforce this limit
        return
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard < 0 else min(soft, hard), hard))


def _reply(sink: BinaryIO, refusal: str, grammar: str = "") -> None:
    sink.write(json.dumps({"refusal": refusal, "grammar": grammar}).encode() + b"\n")
    sink.flush()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
