"""Text to token ids and back, in the HTTP process, without the model."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from kvq.errors import RequestError, first_lines
from kvq.models.unicode import check_unicode
from kvq.server.bodies import ChatMessage
from kvq.server.problems import Problem, unavailable
from kvq.server.token_texts import TokenTexts

T = TypeVar("T")
_DEADLINE_S = 30.0  # for a template or a tokenizer
_MAX_ASIDE = 64  # texts that may wait in line beside those to be generated from


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a chat template is given."""

    messages: Sequence[ChatMessage]
    options: dict[str, Any] = field(default_factory=dict)


class Prompts:
    """A model's tokenizer and its chat template, off the event loop, under a deadline."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        is_text_template: bool = False,
        deadline_s: float = _DEADLINE_S,
        max_tokens: Callable[[], int | None] = lambda: None,
        max_waiting: int | None = None,
        threads: int = 2,
    ) -> None:
        """`is_text_template`: the template joins calls from text; others want their arguments as objects.

        `deadline_s`: for one prompt, the wait for a free thread included. `max_tokens` tells what fits
        the model: a text that has more tokens however it is cut is refused by its length.
        """
        self.texts = TokenTexts(tokenizer)
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._max_tokens = max_tokens
        self._max_waiting = max_waiting
        self.num_waiting = 0  # texts that are not token ids yet
        self._is_text_template = is_text_template
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvq-tokenize")

    def aside(self) -> "Prompts":
        """The same, of any length, for who only wants to know: a line and a thread of its own."""
        return Prompts(
            self._tokenizer,
            is_text_template=self._is_text_template,
            deadline_s=self._deadline_s,
            max_waiting=_MAX_ASIDE,
            threads=1,
        )

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            Problem: it is no valid text, or takes too long.
        """
        return await self._run(partial(self._tokenize, text, special))

    async def chat(self, messages: Sequence[ChatMessage], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's own format.

        Raises:
            Problem: the model has no template, or its template refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise Problem(400, "this model has no chat template; use /v1/completions", param="messages")
        return await self._run(partial(self._render, self._turns(messages), options))

    async def shared_lengths(
        self, tokens: Sequence[int], whole: Conversation, others: Sequence[Conversation]
    ) -> list[int]:
        """How many of its first tokens a conversation shares with each of some others; 0 with its equals.

        `tokens`: what `chat` made of the whole one.

        Raises:
            Problem: the template refuses one of the others, or it takes too long.
        """
        return await self._run(partial(self._shared_lengths, tokens, whole, others))

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of token ids, special tokens included."""
        return await self._run(partial(self._tokenizer.decode, tokens))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _turns(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        return [_turn(message, self._is_text_template) for message in messages]

    def _tokenize(self, text: str, special: bool) -> list[int]:
        check_unicode(text, "the prompt")
        self._check_length(text)
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _check_length(self, text: str) -> None:
        most = self._max_tokens()
        if most is not None and len(text) > most * self._longest_token:
            raise Problem(
                400,
                f"the prompt has {len(text)} characters, which are more than the model's {most} tokens",
                code="context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters; a byte counts as one."""
        return max(map(len, self._tokenizer.get_vocab()))

    def _render(self, turns: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        return self._tokenize(self._text(turns, options), False)

    def _text(self, turns: list[dict[str, Any]], options: dict[str, Any]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, **options)
        except Exception as error:
            raise Problem(400, f"the model's chat template refused this: {first_lines(error)}") from error
        return text

    def _shared_lengths(
        self, tokens: Sequence[int], whole: Conversation, others: Sequence[Conversation]
    ) -> list[int]:
        """The texts' common beginning decides, up to where it is cut into the same tokens."""
        text, *rest = (self._text(self._turns(one.messages), one.options) for one in (whole, *others))
        shared = [self._tokenize(text[: _num_common(text, other)], False) for other in rest]
        counts = [_num_common(ids, tokens) for ids in shared]
        return [0 if other == text else count for other, count in zip(rest, counts, strict=True)]

    async def _run(self, work: Callable[[], T]) -> T:
        if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
            raise unavailable(f"{self.num_waiting} texts wait already to be tokenized; try again later")
        self.num_waiting += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, work)
            return await asyncio.wait_for(future, self._deadline_s)
        except RequestError as error:
            raise Problem(400, str(error)) from error
        except TimeoutError as error:
            raise unavailable(f"the prompt was not tokenized within {self._deadline_s:.0f} s") from error
        finally:
            self.num_waiting -= 1


def _num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many items two sequences share from the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def _turn(message: ChatMessage, is_text_template: bool) -> dict[str, Any]:
    turn = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        turn["content"] = "".join(part.text for part in message.content)
    if not message.tool_calls:
        turn.pop("tool_calls", None)  # templates ask whether there is such a thing
    elif is_text_template:
        turn["content"] = turn.get("content") or None
    else:
        for call in turn["tool_calls"]:
            call["function"]["arguments"] = _as_object(call["function"]["arguments"])
    turn.setdefault("content", "")
    return turn


def _as_object(arguments: str) -> Any:
    """Arguments as templates expect them. What a model wrote that is no JSON stays as it is."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
