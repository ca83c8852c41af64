"""Registered quantizers: a program's own, found by the names it gave them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from kvq.errors import ConfigError

Through = Callable[[Any], Any]  # fp32 [..., dim], or [..., tokens, dim] of whole blocks -> the same shape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Own:  # D8: blocks hold what is read back, in fp32
    """Quantizer of rows of K or V, with the bits it is said to take; blocks hold the result in fp32."""

    registered: ClassVar[dict[str, "Own"]] = {}
    name: str
    through: Through = field(repr=False)
    bits: Callable[[int], float] = field(
        repr=False
    )  # an element of rows of so many; raises ConfigError for rows that don't fit
    tokens: int | None = None  # of the blocks that it takes whole; None: rows, each by itself
    # Under one name another process may do something else: what one has written the other can't read.
    nonce: str = field(default_factory=lambda: uuid4().hex, repr=False)

    def __deepcopy__(self, memo: object) -> "Own":
        return self  # told apart by identity


def tokens_of(own: list[Own]) -> int | None:
    """Return the block size in tokens of quantizers that take whole blocks, or None."""
    sizes = {one.tokens for one in own if one.tokens is not None}
    if len(sizes) > 1:
        raise ConfigError(f"registered formats take blocks of {sizes} tokens; all layers have one size")
    return sizes.pop() if sizes else None
