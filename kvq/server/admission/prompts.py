"""Prompts: conversion of texts and conversations to token ids and back, in separate processes."""

import asyncio
import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from kvq.errors import KVQError
from kvq.models.loading.tokenizer import template_source
from kvq.models.templates.forms import Forms
from kvq.models.templates.pairs import knows_pairs
from kvq.server.admission.bodies import ChatMessage
from kvq.server.engine.messages import pack
from kvq.server.engine.token_texts import TokenTexts
from kvq.server.http.json_bounds import MAX_TOKEN_IDS
from kvq.server.http.problems import Problem, failed, unavailable
from kvq.server.reading import Lane, Overran, Readers
from kvq.server.reading.jobs import Job, JobResult

_log = logging.getLogger("kvq")
DEADLINE_S = 30.0  # limit per prompt, including the wait for a free reader
_MAX_COUNTING = 64  # waiting texts that are only counted
_WIDTH = 2  # prompts of a kind that are read at the same time
_A_FEW = 128  # messages converted without a pause
PROBE = "\0probe"  # a separate tenant, so that it waits for at most one job of each other tenant
_FRESH_S = 5.0  # validity of a probe's result
_BROKEN_S = 60.0  # validity of the result that a template is broken
_PING = [ChatMessage(role="user", content="ping")]
Conversation = tuple[Sequence[ChatMessage], dict[str, Any]]  # messages, and options for a chat template
_BROKEN = "the model's chat template is broken: for one short message"


class _TemplateFails(Problem):
    """Problem: the chat template failed with an error that it did not raise on purpose."""


class Prompts:
    """Client of the tokenizer and chat template, with limits and deadlines, fair across tenants.

    Texts and conversations have separate readers: a template that never returns does not block completions.
    """

    def __init__(
        self,
        readers: Readers,
        tokenizer: Any,
        *,
        plain_texts: bool = False,
        deadline_s: float = DEADLINE_S,
        max_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`tokenizer`: the one that the readers use, for quick work in this process. `plain_texts`: control
        tokens in texts outside conversations are read as plain text. `deadline_s`: time limit per prompt,
        including the wait for a free reader. `max_tokens` returns the model's maximum number of tokens; texts
        that are certain to exceed this number are refused without tokenizing them.
        """
        self.texts = TokenTexts(tokenizer)
        self.why_broken: str | None = None  # why no conversation can be read, or None
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self.knows_pairs = knows_pairs(template_source(tokenizer))  # queries and documents as messages
        self._readers = readers
        self._plain_texts = plain_texts
        self._deadline_s = deadline_s
        self._max_tokens = max_tokens
        self._bounds: dict[str, Any] = {}  # limits on the token ids of a text that is only counted
        self._for_texts, self._for_chats = Lane(readers, width=_WIDTH), Lane(readers, width=_WIDTH)
        self._probing: asyncio.Task[None] | None = None
        self._probed_s = -_BROKEN_S

    @property
    def num_waiting(self) -> int:
        """Number of texts and conversations that are not yet tokenized."""
        return sum(lane.num_waiting for lane in {self._for_texts, self._for_chats})

    async def start(self) -> None:
        """Load the readers' tokenizer and try the chat template now rather than at first use.

        Raises:
            KVQError: the tokenizer can't be loaded.
        """
        await self._readers.start()
        with contextlib.suppress(Problem):  # then it is tried again
            if why := await self.try_one():
                _log.error("chat template: no conversation can be read: %s", why)
            elif lacking := (await self.forms()).lacking:
                _log.info("chat template: no place for %s; the model will not see any", lacking)

    async def forms(self) -> Forms:
        """Return which message parts the chat template renders, and in which forms, as found by a trial.

        Raises:
            Problem: the template can't be tried at the moment.
        """
        readers = self._readers
        if not self._has_template:
            return Forms()
        async with readers.trying:
            if readers.forms is None:
                try:
                    found = await self._do(self._for_chats, Job(task="forms"), PROBE, 0)
                except Overran:
                    found = JobResult()
                readers.forms = found.forms
            return readers.forms

    def for_counting(self) -> "Prompts":
        """Return a copy with a separate queue and no length limit, for requests that do not generate."""
        other = copy.copy(self)
        other._max_tokens = lambda: None
        other._bounds = {"most_told": MAX_TOKEN_IDS}
        other._for_texts = other._for_chats = Lane(self._readers, width=1, max_waiting=_MAX_COUNTING)
        return other

    async def tokenize(
        self, text: str, *, special: bool = True, second: str | None = None, tenant: str = ""
    ) -> Sequence[int]:
        """Return the token ids of a text, or of a pair with a second one.

        Raises:
            Problem: the text is not valid Unicode, or tokenizing it takes too long.
        """
        given = {
            "text": text,
            "special": special,  # add the special tokens that the tokenizer puts around a text
            "plain": self._plain_texts,
            "max_tokens": self._max_tokens(),
        }
        given |= {} if second is None else {"second": second}
        job = Job(task="encode", given=given, **self._bounds)
        return (await self._do(self._for_texts, job, tenant, len(text) + len(second or ""))).numbers

    async def chat(self, conversation: Conversation, *, tenant: str = "") -> Sequence[int]:
        """Return the token ids of a conversation; see `read_chat`."""
        return (await self.read_chat(conversation, tenant=tenant))[0]

    async def read_chat(
        self, conversation: Conversation, *, tenant: str = ""
    ) -> tuple[Sequence[int], tuple[tuple[int, int], ...]]:
        """Return a conversation's token ids, rendered with the model's chat template, and its texts' ranges.

        Raises:
            Problem: the model has no template, or the template rejects the messages or takes too long.
        """
        if not self._has_template:
            raise Problem(400, "this model has no chat template; use /v1/completions", param="messages")
        if self.why_broken is not None:
            self._look_again()
            raise failed(self.why_broken)
        messages, options = conversation
        turns = await _as_dicts(messages)
        given = {"turns": turns, "options": options, "max_tokens": self._max_tokens()}
        job = Job(task="encode_chat", given=given, forms=await self.forms(), **self._bounds)
        try:
            found = await self._do(self._for_chats, job, tenant, _num_bytes(turns))
            return found.numbers, found.texts
        except (Overran, _TemplateFails) as error:
            if await self.probe() is not None:  # the template fails for every conversation
                raise failed(str(self.why_broken)) from error
            if isinstance(error, Problem):
                raise
            words = f"the model's chat template takes {error} for this"
            raise Problem(400, words, param="messages") from error

    async def shared_lengths(
        self, tokens: Sequence[int], whole: Conversation, others: Sequence[Conversation], *, tenant: str = ""
    ) -> Sequence[int]:
        """Return the length of the common prefix of `whole` and each of `others`, or 0 if the two are equal.

        `tokens`: the result of `chat` for `whole`.

        Raises:
            Problem: the template rejects one of `others`, or takes too long.
        """
        read = [(await _as_dicts(messages), options) for messages, options in (whole, *others)]
        given = {"tokens": pack(tokens), "whole": read[0], "others": read[1:]}
        job = Job(task="shared_lengths", given=given, forms=await self.forms())
        num_bytes = sum(_num_bytes(turns) for turns, _ in read)
        return (await self._do(self._for_chats, job, tenant, num_bytes)).numbers

    async def detokenize(self, tokens: Sequence[int], *, tenant: str = "") -> str:
        """Return the text of token ids, including special tokens."""
        job = Job(task="decode", given={"tokens": pack(tokens)})
        return (await self._do(self._for_texts, job, tenant, 4 * len(tokens))).text

    async def probe(self) -> str | None:
        """Return the reason why a recent trial with small prompts failed, or None if it succeeded."""
        self._look_again()
        if self._probing is not None:
            await asyncio.wait((self._probing,))
        return self.why_broken

    async def try_one(self) -> str | None:
        """Try a small text and a small conversation now; return the reason for a failure, or None.

        Raises:
            Problem: the trial can't be run at the moment.
        """
        try:
            await self.tokenize("ping", tenant=PROBE)
            if self._has_template:
                given = {"turns": await _as_dicts(_PING), "options": {"add_generation_prompt": True}}
                job = Job(task="encode_chat", given=given, forms=await self.forms())
                await self._do(self._for_chats, job, PROBE, 0)
        except Overran as error:
            return f"{_BROKEN} it takes {error}"
        except _TemplateFails as error:
            reason = error.message.rpartition("template fails for this: ")[2]
            return f"{_BROKEN} {reason}; --chat-template FILE takes another"
        except Problem as problem:
            if problem.status > 500:
                raise
            return problem.message if problem.status == 500 else None  # it may refuse this conversation
        return None

    def close(self) -> None:
        """Kill the readers, including busy ones."""
        if self._probing is not None:
            self._probing.cancel()
        self._for_texts.close()
        self._for_chats.close()
        self._readers.close()

    def stop(self) -> None:
        """Kill the readers, which the next use starts again."""
        for lane in (self._for_texts, self._for_chats):
            lane.forget()
        self._readers.stop()

    def _look_again(self) -> None:
        fresh_s = _FRESH_S if self.why_broken is None else _BROKEN_S
        if self._probing is None and monotonic() - self._probed_s > fresh_s:
            self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        try:
            with contextlib.suppress(Problem):
                self.why_broken = await self.try_one()
        finally:
            self._probed_s = monotonic()
            self._probing = None

    async def _do(self, lane: Lane, job: Job, tenant: str, num_bytes: int) -> JobResult:
        try:
            deadline_s = DEADLINE_S if job.task == "forms" else self._deadline_s
            answer = await lane.do(job, tenant=tenant, num_bytes=num_bytes, deadline_s=deadline_s)
        except Overran as error:
            if job.task in ("encode_chat", "forms"):
                raise
            raise Problem(400, f"the prompt takes {error} to be tokenized; send a shorter one") from error
        except UnicodeEncodeError as error:
            raise Problem(400, f"the prompt is not valid Unicode: {error.reason}") from error
        except TimeoutError as error:
            raise unavailable(f"the prompt was not tokenized within {self._deadline_s:.0f} s") from error
        except KVQError as error:
            raise unavailable(str(error)) from error
        if (reason := answer.refusal) is None:
            return answer
        if answer.has_failed:
            raise failed(reason)
        if answer.template_fails:
            raise _TemplateFails(400, reason, param="messages")
        raise Problem(400, reason, code="context_length_exceeded" if answer.is_too_long else None)


async def _as_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as dicts; yield to the event loop at intervals if there are many."""
    turns: list[dict[str, Any]] = []
    for at in range(0, len(messages), _A_FEW):
        if at:
            await asyncio.sleep(0)
        turns += [message.model_dump(exclude_none=True) for message in messages[at : at + _A_FEW]]
    return turns


def _num_bytes(turns: Sequence[dict[str, Any]]) -> int:
    """Return the approximate size of the conversation's texts in bytes."""
    return sum(
        len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
        for turn in turns
        if (content := turn.get("content"))
    )
