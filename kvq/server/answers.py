"""The engine's messages as OpenAI's objects."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

from kvq.engine import TokenLogprobs
from kvq.engine.outputs import Piece
from kvq.server.messages import Ended
from kvq.server.token_texts import TokenTexts

_REASONS = {"cancelled": "stop", "error": "error"}


@dataclass(slots=True)
class Choice:
    """One result so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, delta: Piece) -> None:
        """Add what a step brought."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason = reason_of(delta)


@dataclass(slots=True)
class Usage:
    """Tokens of a request, or of all the prompts of one."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def take(self, ended: Ended) -> None:
        """Add what an ended request used."""
        if ended.receipt is not None:
            self.prompt += ended.receipt.prompt_tokens
            self.completion += ended.receipt.generated_tokens
            self.cached += ended.receipt.cached_tokens

    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True)
class Head:
    """What all objects of one answer begin with."""

    model: str
    id: str
    created: int

    @classmethod
    def new(cls, prefix: str, model: str) -> "Head":
        """A new answer's."""
        return cls(model, f"{prefix}-{uuid4().hex}", int(time()))

    def body(self, object: str) -> dict[str, Any]:
        """An object's first fields."""
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}


def reason_of(delta: Piece) -> str | None:
    """Why a result ended, in OpenAI's words."""
    reason = delta.finish_reason
    return None if reason is None else _REASONS.get(reason, reason)


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs | None], start: int, texts: TokenTexts
) -> dict[str, Any]:
    """Of tokens whose text begins at character `start`; the first token of a prompt has none."""
    tokens, values, tops, offsets = [], [], [], []
    for token, entry in zip(ids, entries, strict=True):
        tokens.append(texts.text(token))
        values.append(None if entry is None else _finite(entry.logprob))
        tops.append(None if entry is None else {texts.text(t): _finite(value) for t, value in entry.top})
        offsets.append(start)
        start += sum(byte & 0xC0 != 0x80 for byte in texts.raw(token))  # characters that begin in it
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Of a message's tokens."""
    return {"content": [_chat_token(entry, texts) for entry in entries], "refusal": None}


def _chat_token(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    tops = [_named(token, value, texts) for token, value in entry.top]
    return _named(entry.token, entry.logprob, texts) | {"top_logprobs": tops}


def _named(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": list(texts.raw(token))}


def _finite(value: float) -> float:
    """JSON has no infinity; OpenAI's lowest is -9999."""
    return max(value, -9999.0)
