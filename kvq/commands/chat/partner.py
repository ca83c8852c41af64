"""Whom one chats with: what the loop needs of an engine here, or of a server elsewhere."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from kvq.commands.shared.options import TOKENS, option
from kvq.errors import KVQError

Turn = dict[str, str]  # role, content
Show = Callable[[str], object]  # is told the answer's text as it comes


class ContextFull(KVQError):
    """The conversation leaves no room for an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How answers are chosen."""

    temperature: float | None = option(None, "0 takes the likeliest token.  [default: 0.7]", type=float)
    top_p: float | None = option(None, "Keep this share of probability.  [default: 1]", type=float)
    max_tokens: int | None = option(
        None, "Of one answer.  [default: the context]", names="--max-tokens -n", type=TOKENS
    )
    seed: int | None = option(None, "Makes sampling repeatable.", type=int)

    def body(self) -> dict[str, Any]:
        """What was given, by OpenAI's names."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """What an answer took."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_s: float
    total_s: float
    kv_bytes: int | None = None  # at its peak; None where a server does not say
    fills_context: bool = False  # it ended because there was no room for more

    @property
    def tokens_per_s(self) -> float:
        """After the first one; 0 if there was no other."""
        rest = self.total_s - self.ttft_s
        return (self.generated_tokens - 1) / rest if rest > 0 and self.generated_tokens > 1 else 0.0


class Partner(Protocol):
    """Answers conversations."""

    name: str

    def answer(self, turns: list[Turn], show: Show) -> Answered:
        """Answer the last turn; a KeyboardInterrupt on the way cancels what runs.

        Raises:
            ContextFull: no room for an answer.
            KVQError: it can't be answered.
        """

    def close(self) -> None:
        """Give back what it holds."""
