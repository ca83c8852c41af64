"""Messages, answers and sampling parameters of a chat with a local engine or a server."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvq.commands.shared.declare import option
from kvq.commands.shared.param_types import TOKENS
from kvq.errors import KVQError

Message = dict[str, str]  # role, content
Show = Callable[[str], object]  # receives the text of the answer as it is generated


class ContextFull(KVQError):
    """Error: the conversation leaves no room for an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSampling:
    """Options for sampling parameters."""

    temperature: float | None = option(None, "0 takes the likeliest token.  [default: 0.7]", type=float)
    top_p: float | None = option(None, "Keep this share of probability.  [default: 1]", type=float)
    max_tokens: int | None = option(
        None, "Most tokens of an answer.  [default: the context]", names="--max-tokens -n", type=TOKENS
    )
    seed: int | None = option(None, "Makes sampling repeatable.", type=int)

    def body(self) -> dict[str, Any]:
        """Return the specified parameters, keyed by OpenAI's names."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Statistics of an answer."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_s: float
    total_s: float
    kv_bytes: int | None = None  # peak; None if the server does not report it
    fills_context: bool = False  # whether the answer ended because the context is full

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first token, or 0 if there was only one token."""
        rest = self.total_s - self.ttft_s
        return (self.generated_tokens - 1) / rest if rest > 0 and self.generated_tokens > 1 else 0.0
