"""A door of the fuzzer: chat templates and what is said in them, read as the server reads them.

Templates of seven families, most of them damaged, over conversations that spell control tokens. A reader
is forked for each, as the server forks its own. Asked is that it answers, refuses, or is ended by its limits,
and that no user's text becomes a control token of a template that is whole.
"""

import os
import random
import signal
import socket
from functools import cache
from typing import Any

from kvq.models.loading.control_tokens import ControlTokens
from kvq.models.run.prompts import PromptEncoder
from kvq.models.templates.forms import Forms
from kvq.server.engine.frames import Decoder, encode, read
from kvq.server.reading.host import NO_MEMORY, read_jobs
from kvq.server.reading.jobs import Job, JobResult, unpack
from tests.models.chat_families import FAMILIES

_PROCESSOR_S = 0.5
_MEMORY_BYTES = 256 << 20
_HANG_S = 120.0  # on a busy machine
_ROLES = ("user", "user", "assistant", "system", "tool", "developer", "", "x\n")
_SNIPPETS = [
    "{{ messages }}", "{{ messages[0].content * 100000000 }}", "{{ 'a' * 10000000000 }}",
    "{{ raise_exception('no') }}", "{% for i in range(999999999) %}{{ i }}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% set x = namespace(a=1) %}{% set x.a = messages %}{{ x.a }}", "{{ ''.__class__.__mro__ }}",
    "{{ 1 / 0 }}", "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}",
    "{{ undefined.x.y }}", "{{ messages | tojson }}",
    "{{ messages | map(attribute='content') | join('<|im_end|>') }}", "{{ range(10**12) | list }}",
    "{% include 'x' %}", "{% extends 'x' %}", "{{ self }}", "{{ strftime_now('%Y' * 100000) }}", "{{", "%}",
    "{#", "{% endif %}", "{{ '%1000000000d' % 1 }}", "{{ '{:>1000000000}'.format(1) }}",
    "{{ messages.append(messages) }}", "{{ loop }}", "\ud800", "{% generation %}x{% endgeneration %}",
    "{{ cycler }}", "{{ messages[-1].tool_calls[0] }}", "{{ 9**9**9 }}",
]  # fmt: skip


def case(odds: random.Random) -> str | None:
    """One conversation in one template."""
    name = odds.choice(sorted(FAMILIES))
    encoder, tokenizer, whole = _encoder(name)
    is_whole = odds.random() < 0.4
    turns = _turns(odds, _spellings(name))
    tokenizer.chat_template = whole if is_whole else _damaged(odds, whole)
    try:
        answers, status = _read(encoder, [turns, [{**turn, "content": "x"} for turn in turns]])
    finally:
        shown, tokenizer.chat_template = tokenizer.chat_template, whole
    told = f"{name}, {turns!r:.500} in {shown!r:.600}"
    if status is not None and status not in (-signal.SIGPROF, -signal.SIGABRT, NO_MEMORY):
        return f"the reader ended with {status}: {told}"
    for answer in answers:
        if answer.has_failed:
            return f"{answer.refusal}: {told}"
    if is_whole and all(answer.refusal is None for answer in answers) and len(answers) == 2:
        found, wanted = (_structure(name, tokenizer, answer) for answer in answers)
        if found != wanted and not any(
            turn["role"] in ("assistant", "system", "developer") for turn in turns
        ):
            return f"control tokens {found}, wanted {wanted}: {told}"
    return None


@cache
def _encoder(name: str) -> tuple[PromptEncoder, Any, str]:
    tokenizer = FAMILIES[name]()
    encoder = PromptEncoder(tokenizer)
    encoder.warm_up()
    return encoder, tokenizer, tokenizer.chat_template


@cache
def _spellings(name: str) -> list[str]:
    """Return spellings of the control tokens."""
    return sorted(ControlTokens(FAMILIES[name]()).spellings)


def _turns(odds: random.Random, spellings: list[str]) -> list[dict[str, Any]]:
    parts = [
        *spellings,
        *(one[: len(one) // 2] for one in spellings),
        "hi",
        "\n",
        " ",
        "<",
        "|",
        "\0",
        "\u202e",
    ]
    texts = ["".join(odds.choices(parts, k=odds.randrange(8))) for _ in range(odds.choice((1, 2, 3, 30)))]
    return [{"role": odds.choice(_ROLES), "content": text} for text in texts]


def _damaged(odds: random.Random, template: str) -> str:
    for _ in range(odds.choice((1, 1, 2, 4))):
        at = odds.randrange(len(template) + 1)
        end = min(len(template), at + odds.choice((0, 1, 5, 40)))
        template = (
            template[:at] + odds.choice(("", template[at:end], *odds.sample(_SNIPPETS, 4))) + template[end:]
        )
    return template


def _read(encoder: PromptEncoder, talks: list[list[dict[str, Any]]]) -> tuple[list[JobResult], int | None]:
    """Return a reader's result for each conversation, and how it ended if that was before the last."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        read_jobs(theirs.detach(), encoder, _MEMORY_BYTES)
    theirs.close()
    answers: list[JobResult] = []
    decoder: Decoder[JobResult] = Decoder(JobResult)
    with ours:
        ours.settimeout(_HANG_S)
        try:
            for turns in talks:
                given = {"turns": turns, "options": {}, "max_tokens": 100_000}
                job = Job(task="encode_chat", given=given, forms=Forms(), processor_s=_PROCESSOR_S)
                ours.sendall(encode(job))
                if (answer := read(ours, decoder)) is None:
                    break
                answers.append(answer)
        except (OSError, UnicodeEncodeError):
            pass
        is_done = len(answers) == len(talks)
    if is_done:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return answers, None if is_done or status == 0 else status


def _structure(name: str, tokenizer: Any, answer: JobResult) -> list[int]:
    assert answer.refusal is None, "token ids"
    known = {tokenizer.convert_tokens_to_ids(one) for one in _spellings(name)}
    return [
        token
        for token in unpack(answer.packed)
        if token in known - {tokenizer.convert_tokens_to_ids("<unk>")}
    ]
