"""Merges of a SentencePiece vocabulary, of which a GGUF file has the scores alone.

SentencePiece joins neighbouring pieces to the token with the highest score, the leftmost first, until no two make
a token. The tokenizers library takes the pairs instead, best first. What happens within a piece doesn't depend
on what is around it, so each token is made of one pair only: most other ways to cut it in two tokens are found
out here and left out, which halves the time that the library takes.

A token's rank is its place among all, the highest score first. All tokens are handled at once, in numpy, as 64-bit
hashes of their characters: a table of 262,144 strings in Python would take most of a second.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_ODD = 0x9E3779B97F4A7C15  # has an inverse modulo 2**64
_SPARE_BITS = 2  # a table has 4 to 8 places per token
_CHARACTER, _UNKNOWN = -1, -2


def scored_merges(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of tokens that make another, in the order of what they make.

    `tokens`: without empty or equal ones, the highest score first.
    """
    if not tokens:
        return []
    table = _Table(tokens)
    whole, left, right = _pairs(table)
    by_length = np.argsort(table.lengths[whole].astype(np.uint32), kind="stable")
    lengths = table.lengths[whole[by_length]]
    history, kept = _History(table), []
    for rows in np.split(by_length, np.flatnonzero(np.diff(lengths)) + 1):
        kept.append(rows[history.possible(whole[rows], left[rows], right[rows])])
    chosen = np.sort(np.concatenate(kept))
    texts = np.array([*tokens, None], dtype=object)  # None: no array of one string's characters
    return list(zip(texts[left[chosen]].tolist(), texts[right[chosen]].tolist(), strict=True))


class _Table:
    """Tokens by hash: a sum of characters, each times a power of an odd number, modulo 2**64."""

    def __init__(self, tokens: Sequence[str]) -> None:
        joined = "".join(tokens)
        self.lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self.ends = self.lengths.cumsum()
        self.begins = self.ends - self.lengths
        self._powers = _powers(_ODD, len(joined))
        self._inverses = _powers(pow(_ODD, -1, 1 << 64), len(joined))
        mixed = (np.frombuffer(joined.encode("utf-32-le"), "<u4") + np.uint64(1)) * np.uint64(_ODD)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(_ODD)
        self._sums = np.zeros(len(joined) + 1, np.uint64)
        np.cumsum(mixed * self._powers[:-1], out=self._sums[1:])
        self._hashes = self.hashes(self.begins, self.ends)
        self._shift = np.uint64(64 - _SPARE_BITS - len(tokens).bit_length())
        self._tables: list[Array] = []  # each has the tokens whose place in those before is another's
        left = np.arange(len(tokens), dtype=np.int32)
        while len(left):
            places = self._places(self._hashes[left], len(self._tables))
            table = np.zeros(1 << (64 - int(self._shift)), np.int32)
            table[places] = left
            self._tables.append(table)
            left = left[table[places] != left]

    def hashes(self, begins: Array, ends: Array) -> Array:
        """Return the hashes of parts of the joined tokens: uint64 like `begins`."""
        hashes: Array = (self._sums[ends] - self._sums[begins]) * self._inverses[begins]
        return hashes

    def find(self, hashes: Array) -> Array:
        """Return the tokens with these hashes, or -1: int32 like `hashes`."""
        found: Array = self._tables[0][self._places(hashes, 0)]
        missed = np.flatnonzero(self._hashes[found] != hashes)
        for number, table in enumerate(self._tables[1:], 1):
            others = table[self._places(hashes[missed], number)]
            is_it = self._hashes[others] == hashes[missed]
            found[missed[is_it]] = others[is_it]
            missed = missed[~is_it]
        found[missed] = -1
        return found

    def joined(self, left: Array, right: Array) -> Array:
        """Return the tokens that pairs of tokens make, or -1."""
        return self.find(self._hashes[left] + self._hashes[right] * self._powers[self.lengths[left]])

    def _places(self, hashes: Array, number: int) -> Array:
        places: Array = (hashes * np.uint64(_ODD + 2 * number)) >> self._shift
        return places


def _powers(base: int, count: int) -> Array:
    powers = np.full(count + 1, base, np.uint64)
    powers[0] = 1
    return powers.cumprod()


def _pairs(table: _Table) -> tuple[Array, Array, Array]:
    """Return every way to cut a token in two tokens, as (token, left, right), ordered by token."""
    inside = np.ones(int(table.ends[-1]), bool)
    inside[table.begins] = False
    cuts = np.flatnonzero(inside)
    whole = np.repeat(np.arange(len(table.lengths), dtype=np.int32), table.lengths)[cuts]
    right = table.find(table.hashes(cuts, table.ends[whole]))
    cuts, whole, right = (values[right >= 0] for values in (cuts, whole, right))
    left = table.find(table.hashes(table.begins[whole], cuts))
    is_pair = left >= 0
    return whole[is_pair], left[is_pair], right[is_pair]


class _History:
    """How tokens came about: the pair that each is made of, and the lowest rank of all merges in it.

    Of two pieces next to each other, the one with the lower ranked merge in it was completed later.
    """

    def __init__(self, table: _Table) -> None:
        self._table = table
        self._left = np.full(len(table.lengths), -1, np.int32)
        self._right = self._left.copy()
        self._worst = np.where(table.lengths == 1, _CHARACTER, _UNKNOWN).astype(np.int32)

    def possible(self, whole: Array, left: Array, right: Array) -> Array:
        """Return which pairs may make their token: bool like `whole`. Remember it where one is left.

        `whole`: tokens of one length, later than all shorter ones, with equal ones next to each other.
        """
        kept = ~self._never_meet(left, right, ~_alone(whole))
        whole, left, right = whole[kept], left[kept], right[kept]
        whole, left, right = (values[_alone(whole)] for values in (whole, left, right))
        self._left[whole], self._right[whole] = left, right
        worst = self._worst[np.stack([left, right])]
        self._worst[whole] = np.where((worst == _UNKNOWN).any(0), _UNKNOWN, np.maximum(whole, worst.max(0)))
        return kept

    def _never_meet(self, left: Array, right: Array, is_asked: Array) -> Array:
        """Return which pairs can't be next to each other: bool like `left`, and False where not asked.

        The pieces at the cut are taken apart again, the later one first. If its inner half and its neighbour make
        a token that ranks before one of the merges that were still to come, that token was made instead.
        """
        never = np.zeros(len(left), bool)
        rows = np.flatnonzero(is_asked)
        left, right = left[rows], right[rows]
        while len(rows):
            worst_left, worst_right = self._worst[left], self._worst[right]
            goes_on = (worst_left != worst_right) & (np.minimum(worst_left, worst_right) != _UNKNOWN)
            rows, left, right = rows[goes_on], left[goes_on], right[goes_on]
            is_left = (worst_left > worst_right)[goes_on]
            later = np.where(is_left, left, right)
            left = np.where(is_left, self._right[later], left)
            right = np.where(is_left, right, self._left[later])
            worst = self._worst[later]
            is_new = worst > np.maximum(self._worst[left], self._worst[right])
            made = self._table.joined(left, right)
            crosses = (made >= 0) & (made < np.where(is_new, worst, later))
            never[rows[crosses]] = True
            rows, left, right = rows[~crosses], left[~crosses], right[~crosses]
        return never


def _alone(values: Array) -> Array:
    """Return which values differ from both neighbours: bool like `values`."""
    differs = np.concatenate([[True], values[1:] != values[:-1], [True]])
    alone: Array = differs[1:] & differs[:-1]
    return alone
