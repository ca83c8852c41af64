"""Messages between the HTTP process and the prompt readers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvq.models.run.prompts import PromptEncoder
from kvq.models.templates.forms import Forms
from kvq.server.engine.messages import Message, pack, unpack


class Setup(Message, frozen=True):
    """First message to the host process: the tokenizer to load."""

    folder: str  # of the model
    chat_template: str | None = None  # instead of the model's own
    trusts_chats: bool = False  # as `PromptEncoder` has it
    memory_bytes: int = 1 << 30  # that one job may take, beside the tokenizer's own


class Done(Message, frozen=True):
    """Result of a job: `packed` token ids or counts, a text, or the forms of the chat template."""

    packed: bytes = b""
    text: str = ""
    forms: Forms = Forms()

    @property
    def numbers(self) -> Sequence[int]:
        """The token ids or counts."""
        return unpack(self.packed)


class Refusal(Message, frozen=True):
    """Reason why a job can't be done; the job's own fault, unless `has_failed`."""

    reason: str
    is_too_long: bool = False
    template_fails: bool = False  # maybe for other conversations, too
    has_failed: bool = False


class Job(Message, frozen=True, kw_only=True):
    """Work for a reader."""

    processor_s: float = 0.0  # that it may take, or the process is ended
    most_told: int = 1 << 20  # token ids of an answer

    def do(self, encoder: PromptEncoder) -> "FromReader":
        """Do the job and return its answer. Raises RequestError: it can't be done."""
        raise NotImplementedError

    def _bounded(self, tokens: list[int]) -> "FromReader":
        if len(tokens) > self.most_told:
            return Refusal(reason=f"it has {len(tokens)} tokens; {self.most_told} are allowed here")
        return Done(packed=pack(tokens))


class Piece(Message, frozen=True):
    """Part of a long text in the job that follows; see `in_pieces`."""

    text: str


class Text(Job, frozen=True, kw_only=True):
    """A text to tokenize."""

    text: str
    special: bool  # with the special tokens that the tokenizer puts around it
    plain: bool  # no control tokens, whatever it spells
    max_tokens: int | None

    def do(self, encoder: PromptEncoder) -> "FromReader":
        """Return its token ids."""
        return self._bounded(
            encoder.encode(self.text, special=self.special, plain=self.plain, max_tokens=self.max_tokens)
        )


class Trial(Job, frozen=True, kw_only=True):
    """The chat template to try."""

    def do(self, encoder: PromptEncoder) -> Done:
        """Return the forms that it shows."""
        return Done(forms=encoder.forms)


class Chat(Job, frozen=True, kw_only=True):
    """A conversation to render and tokenize."""

    turns: list[dict[str, Any]]  # with a number for a content that came in so many pieces
    options: dict[str, Any]
    forms: Forms = Forms()  # of the template
    max_tokens: int | None

    def do(self, encoder: PromptEncoder) -> "FromReader":
        """Return its token ids."""
        encoder.forms = self.forms
        return self._bounded(encoder.encode_chat(self.turns, self.options, max_tokens=self.max_tokens))


class Shared(Job, frozen=True, kw_only=True):
    """A conversation whose first tokens are compared with those of others."""

    tokens: bytes
    whole: tuple[list[dict[str, Any]], dict[str, Any]]
    others: list[tuple[list[dict[str, Any]], dict[str, Any]]]
    forms: Forms

    def do(self, encoder: PromptEncoder) -> Done:
        """Return how many first tokens it shares with each of them."""
        encoder.forms = self.forms
        return Done(packed=pack(encoder.shared_lengths(unpack(self.tokens), self.whole, self.others)))


class Decode(Job, frozen=True, kw_only=True):
    """Token ids whose text is wanted."""

    tokens: bytes

    def do(self, encoder: PromptEncoder) -> Done:
        """Return the text."""
        return Done(text=encoder.decode(unpack(self.tokens)))


ToReader = Piece | Text | Trial | Chat | Shared | Decode
FromReader = Done | Refusal


PIECE = 1 << 17  # characters


def in_pieces(job: Job) -> tuple[list[Piece], Job]:
    """Return the pieces to send before a job, and the job with their number in place of each long text.

    Encoding megabytes at once would hold up the event loop.
    """
    pieces: list[Piece] = []
    if isinstance(job, Text) and len(job.text) > PIECE:
        pieces += _cut(job.text)
        return pieces, msgspec.structs.replace(job, text="")
    if isinstance(job, Chat):
        turns = [_short(turn, pieces) for turn in job.turns]
        return pieces, msgspec.structs.replace(job, turns=turns) if pieces else job
    return pieces, job


def put_together(job: Job, pieces: Sequence[str]) -> Job:
    """Return the whole job again, with the texts of the pieces before it."""
    if not pieces:
        return job
    if isinstance(job, Text):
        return msgspec.structs.replace(job, text="".join(pieces))
    assert isinstance(job, Chat), "no other job has long texts"
    left = iter(pieces)
    return msgspec.structs.replace(job, turns=[_long(turn, left) for turn in job.turns])


def _cut(text: str) -> list[Piece]:
    return [Piece(text=text[at : at + PIECE]) for at in range(0, len(text), PIECE)]


def _short(turn: Mapping[str, Any], pieces: list[Piece]) -> dict[str, Any]:
    content = turn.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or len(content) <= PIECE:
        return dict(turn)
    cut = _cut(content)
    pieces += cut
    return {**turn, "content": len(cut)}


def _long(turn: Mapping[str, Any], pieces: Iterator[str]) -> dict[str, Any]:
    count = turn.get("content")
    if not isinstance(count, int):
        return dict(turn)
    return {**turn, "content": "".join(next(pieces) for _ in range(count))}
