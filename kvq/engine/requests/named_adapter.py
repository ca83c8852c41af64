"""Adapter that requests may name, whether or not its weights are in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import RequestError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NamedAdapter:
    """Name, folder and contents of an adapter. `digest`: SHA-256 of its files."""

    name: str
    folder: Path
    digest: bytes
    invocation: tuple[int, ...] | None  # token ids from whose last occurrence on it acts; None: everywhere

    def start_in(self, tokens: Sequence[int]) -> int:
        """Return the first token of a prompt that it changes.

        Raises:
            RequestError: the prompt does not hold its invocation tokens.
        """
        if self.invocation is None:
            return 0
        wanted, length = list(self.invocation), len(self.invocation)
        for start in range(len(tokens) - length, -1, -1):
            if list(tokens[start : start + length]) == wanted:
                return start
        raise RequestError(  # D423
            f"adapter {self.name!r} acts from its invocation tokens {wanted} on; the prompt lacks them"
        )
