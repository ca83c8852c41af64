"""A rendered session: a conversation's tokens in a model's format, and where its assistant's answers are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvq.errors import RequestError
from kvq.models.loading.prepared import PreparedModel
from kvq.models.run.prompts import PromptEncoder, num_common
from kvq.traces.sessions import RecordedSession


class Answer(NamedTuple):
    """An assistant's turn as tokens [first, end) of a stretch."""

    message: int  # its index in the session
    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Tokens that a model would have read and written, in one sequence.

    Most templates give one per session. Those that drop thoughts or results of earlier turns give several.
    """

    session: int  # its number
    tokens: Sequence[int]
    answers: Sequence[Answer]


class Rendering:
    """Renderer of sessions for one model."""

    def __init__(self, model: PreparedModel, max_tokens: int) -> None:
        """`max_tokens`: of a stretch; later turns are left out."""
        self._encoder = PromptEncoder(model.tokenizer)
        self._end_ids = model.end_ids
        self._max_tokens = max_tokens

    def stretches(self, number: int, session: RecordedSession) -> list[Stretch]:
        """Return the stretches of a session.

        Raises:
            RequestError: the template refuses the conversation, or no answer fits.
        """
        found: list[tuple[list[int], list[Answer]]] = []
        for message in session.answers():
            prompt = self._encode(session, message, begins=True)
            whole = self._encode(session, message + 1, begins=False)
            shared = num_common(prompt, whole)
            if shared < len(prompt):
                raise RequestError(
                    f"the chat template shows message {message + 1} in another way than it is generated, so "
                    f"its tokens are unknown"
                )
            if len(whole) > self._max_tokens:
                break
            answer = Answer(message, len(prompt), self._end(whole, len(prompt)))
            if found and num_common(found[-1][0], prompt) == len(found[-1][0]):
                found[-1] = whole[: answer.end], [*found[-1][1], answer]
            else:
                found.append((whole[: answer.end], [answer]))
        if not found:
            raise RequestError(f"its first answer ends beyond {self._max_tokens:,} tokens")
        return [Stretch(number, tokens, answers) for tokens, answers in found]

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds; a character belongs to the token that completes it."""
        pieces, shown = [], ""
        for end in range(1, len(tokens) + 1):
            text = self._encoder.decode(tokens[:end]).rstrip("\ufffd")
            pieces.append(text[len(shown) :])
            shown = text if len(text) > len(shown) else shown
        return pieces

    def _encode(self, session: RecordedSession, count: int, *, begins: bool) -> list[int]:
        """Return the tokens of the first messages. `begins`: the next answer begins behind them."""
        options = {"tools": list(session.tools) or None, "add_generation_prompt": begins}
        return self._encoder.encode_chat(session.messages[:count], options)

    def _end(self, whole: Sequence[int], first: int) -> int:
        """Return the end of an answer: behind its end token, without what templates put between turns."""
        ends = (at + 1 for at in range(first, len(whole)) if whole[at] in self._end_ids)
        return next(ends, len(whole))
