"""Messages between the HTTP process and the prompt readers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvq.models.run.prompts import PromptEncoder
from kvq.models.templates.forms import Forms
from kvq.server.engine.messages import Message, pack, unpack


class Setup(Message, frozen=True):
    """First message to the host process: the tokenizer to load."""

    folder: str  # model folder
    chat_template: str | None = None  # replaces the model's template
    trusts_chats: bool = False  # passed to `PromptEncoder`
    memory_bytes: int = 1 << 30  # limit for one job, in addition to the tokenizer's memory


class JobResult(Message, frozen=True):
    """Result of a job: token ids or counts (`packed`), a text, the chat template's forms, or a refusal."""

    packed: bytes = b""
    texts: tuple[tuple[int, int], ...] = ()  # of a conversation: token ranges of its messages' texts
    text: str = ""
    forms: Forms = Forms()
    refusal: str | None = None  # reason for refusing the job; the client's fault unless `has_failed`
    is_too_long: bool = False
    template_fails: bool = False  # the template may also fail for other conversations
    has_failed: bool = False

    @property
    def numbers(self) -> Sequence[int]:
        """Token ids or counts, unpacked."""
        return unpack(self.packed)


class Job(Message, frozen=True):
    """Job for a reader: a call of a `PromptEncoder` method, or a trial of the chat template."""

    task: Literal["encode", "encode_chat", "shared_lengths", "decode", "forms"]
    given: dict[str, Any] = msgspec.field(default_factory=dict)  # the method's arguments; token ids packed
    forms: Forms | None = None  # forms of the chat template, for jobs that use it
    processor_s: float = 0.0  # limit on processor time; exceeding it kills the process
    most_told: int = 1 << 20  # maximum number of token ids in a result

    def do(self, encoder: PromptEncoder) -> JobResult:
        """Run the job and return its result; raise RequestError if the job is refused."""
        if self.forms is not None:
            encoder.forms = self.forms
        if self.task == "forms":
            return JobResult(forms=encoder.forms)
        unpacked = {name: unpack(one) if isinstance(one, bytes) else one for name, one in self.given.items()}
        task = "read_chat" if self.task == "encode_chat" else self.task
        found: Any = getattr(encoder, task)(**unpacked)
        found, texts = found if isinstance(found, tuple) else (found, ())
        if isinstance(found, str):
            return JobResult(text=found)
        if len(found) > self.most_told:
            return JobResult(refusal=f"it has {len(found)} tokens; {self.most_told} are allowed here")
        return JobResult(packed=pack(found), texts=tuple(texts))


ToReader = str | Job  # a piece of a long text of the next job (see `in_pieces`), or a job


PIECE = 1 << 17  # characters


def in_pieces(job: Job) -> tuple[list[str], Job]:
    """Return the pieces to send before a job, and a copy of the job with piece counts for its long texts.

    Encoding megabytes in one call would block the event loop.
    """
    pieces: list[str] = []
    given = _short(_short(job.given, "text", pieces), "second", pieces)
    if "turns" in given:
        given["turns"] = [_short(turn, "content", pieces) for turn in given["turns"]]
    return pieces, msgspec.structs.replace(job, given=given)


def put_together(job: Job, pieces: Sequence[str]) -> Job:
    """Return the complete job, with its long texts joined from the previously sent pieces."""
    left = iter(pieces)
    given = _long(_long(job.given, "text", left), "second", left)
    if "turns" in given:
        given["turns"] = [_long(turn, "content", left) for turn in given["turns"]]
    return msgspec.structs.replace(job, given=given)


def _short(whole: Mapping[str, Any], name: str, pieces: list[str]) -> dict[str, Any]:
    text = whole.get(name)
    if isinstance(text, list):
        text = "".join(part["text"] for part in text)
    if not isinstance(text, str) or len(text) <= PIECE:
        return dict(whole)
    cut = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    pieces += cut
    return {**whole, name: len(cut)}


def _long(short: Mapping[str, Any], name: str, pieces: Iterator[str]) -> dict[str, Any]:
    count = short.get(name)
    if not isinstance(count, int):
        return dict(short)
    return {**short, name: "".join(next(pieces) for _ in range(count))}
