"""A sequence as its user sees it, and the KV that its tokens should have."""

from dataclasses import dataclass, field
from zlib import crc32

from kvq.blockmgr import Sequence


def chain(key: int, token: int) -> int:
    """The KV of a token after a prefix whose KV is `key`."""
    return hash((key, token))


@dataclass(eq=False)
class Client:
    """One sequence as its user sees it."""

    sequence: Sequence
    tenant: str
    shared: str | None  # the salt, if not the tenant's own
    tokens: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)  # KV of the known tokens
    drafts: list[int] = field(default_factory=list)  # tokens guessed and appended, not accepted yet
    states: list[tuple[int, int]] = field(default_factory=list)  # (block, tokens) to be written

    def keys_of(self, tokens: list[int]) -> list[int]:
        """The KV of tokens that come after the known ones."""
        salt = f"tenant {self.tenant}" if self.shared is None else f"salt {self.shared}"
        key = self.keys[-1] if self.keys else crc32(salt.encode())
        return [key := chain(key, token) for token in tokens]

    def extend(self, tokens: list[int]) -> None:
        """Learn more tokens."""
        self.keys += self.keys_of(tokens)
        self.tokens += tokens

    def cut(self, length: int) -> None:
        """Forget all tokens but the first."""
        del self.tokens[length:], self.keys[length:]

    @property
    def is_committed(self) -> bool:
        """True if it can be forked, or given more tokens."""
        return self.sequence.committed == self.sequence.length
