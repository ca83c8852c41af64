"""Attention options: scale, window, chunks, softcap, sinks, and parts of the keys by age."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.formats import ExactTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the keys before a query, used if tokens are stored in several forms.

    The first key that is young for a query at position p is edge(p) = floor((p + 1 - recent) / block_size) *
    block_size, so the form in which a query sees a token depends only on the positions of both. Keys in
    [first, min(edge, last)) are old.
    """

    is_young: bool  # False: the old keys, in full blocks that `recent` tokens up to the query follow
    recent: int  # tokens
    block_size: int
    first: int = 0  # of old keys: earlier keys are left out; a multiple of the block size
    last: int | None = None  # of old keys: later keys, from here on, are left out; None: none are

    def edge(self, position: int) -> int:
        """Return the first key that is young for a query at `position`."""
        return max(0, position + 1 - self.recent) // self.block_size * self.block_size

    def edges(self, position: Tensor) -> Tensor:
        """Return `edge` for each of many positions."""
        return (position + 1 - self.recent).clamp(min=0) // self.block_size * self.block_size

    def oldest(self, position: int) -> int:
        """Return the first key that a query at `position`, or at any later one, may see."""
        return self.edge(position) if self.is_young else self.first

    def end(self, position: int) -> int:
        """Return the end of the range of keys that a query at `position`, or at any earlier one, may see."""
        if self.is_young:
            return position + 1
        return self.edge(position) if self.last is None else min(self.edge(position), self.last)

    def hides(self, query: Tensor, key: Tensor) -> Tensor:
        """Return a bool tensor that is True where the key is not in this part."""
        edge = self.edges(query)
        if self.is_young:
            return key < edge
        outside = (key >= edge) | (key < self.first)
        return outside if self.last is None else outside | (key >= self.last)


def parts_of(exact: ExactTokens, block_size: int) -> tuple[Part, Part, Part]:
    """Return the parts of the keys that a staged layer reads from sealed blocks, recent blocks and sinks."""
    old = Part(is_young=False, recent=exact.recent, block_size=block_size, first=exact.sinks)
    return old, replace(old, is_young=True, first=0), replace(old, first=0, last=exact.sinks)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionOptions:  # D229: one frozen value instead of fifteen signatures
    """Attention options of a layer, apart from its blocks.

    `scale` multiplies the scores, then `softcap` bounds them as softcap * tanh(s / softcap). `window`: number
    of keys that a query sees, including the one at its own position. `chunk`: number of tokens in a chunk; a
    query sees only keys in its own chunk, and chunks begin at multiples of `chunk`. `sinks`: [q_heads],
    logits that take part in the softmax but have no value. `part`: part of the keys that is read, if other
    keys are stored elsewhere. `exact`: sum the keys of a query in an order that its position alone
    determines, as kernels on CPUs always do; on GPUs, this costs speed.

    Raises:
        ConfigError: a window or chunk is shorter than one token, or a scale or softcap is not positive.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    part: Part | None = None
    chunk: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ConfigError(f"scale must be more than 0, got {self.scale}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window must be 1 token at least, or None for no window, got {self.window}")
        if self.chunk is not None and self.chunk < 1:
            raise ConfigError(f"chunk must be 1 token at least, or None for no chunks, got {self.chunk}")
        if self.softcap is not None and self.softcap <= 0:
            raise ConfigError(f"softcap must be more than 0, or None for none, got {self.softcap}")

    def within(self, window: int | None) -> "AttentionOptions":
        """Return the options with a window of at most `window` tokens."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return replace(self, window=window)

    def reaching(self, window: int | None, *, is_chunked: bool) -> "AttentionOptions":
        """Return a layer's options: its queries see the last `window` tokens, or a chunk of that size."""
        return replace(self, chunk=window) if is_chunked else self.within(window)

    def of_part(self, part: Part) -> "AttentionOptions":
        """Return the options restricted to one part of the keys."""
        return replace(self, part=part)

    def without_sinks(self) -> "AttentionOptions":
        """Return the options without sinks, which are added only once, when parts of the keys are merged."""
        return self if self.sinks is None else replace(self, sinks=None)

    def oldest(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first if self.part is None else max(first, self.part.oldest(position))

    def end(self, position: int) -> int:
        """Return the end of the range of keys that a query at `position` sees."""
        return position + 1 if self.part is None else self.part.end(position)

    def hides(self, query: Tensor, key: Tensor) -> Tensor:
        """Return a bool tensor, True where `query` does not see `key`; both positions broadcast."""
        hidden = key > query
        if self.window is not None:
            hidden = hidden | (key <= query - self.window)
        if self.chunk is not None:
            hidden = hidden | (key < query // self.chunk * self.chunk)
        return hidden if self.part is None else hidden | self.part.hides(query, key)

    def capped(self, scores: Tensor) -> Tensor:
        """Return the scaled scores with the softcap applied."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
