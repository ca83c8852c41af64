"""Merges of a SentencePiece vocabulary, of which a GGUF file has the scores alone.

SentencePiece joins neighbouring pieces to the token with the highest score, the leftmost first, until no two
make a token. The tokenizers library wants the pairs instead, best first. What happens within a piece doesn't
depend on what is around it, so a token is always made of the same pair; nearly all others are found and left
out, which halves the library's time. A token's rank is its place in the order of scores, 0 for the highest.

All tokens are handled at once, as 64-bit hashes: looking 262,144 up as strings takes twice the time.
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
    whole, left, right = table.pairs()
    lengths = np.minimum(table.lengths, (1 << 16) - 1).astype(np.uint16)[whole]  # numpy sorts few bits fast
    rows = np.argsort(lengths, kind="stable")  # short tokens first: others are made of them
    groups = np.split(rows, np.flatnonzero(np.diff(lengths[rows])) + 1)
    origins = _Origins(table)
    chosen = np.sort(np.concatenate([at[origins.likely(whole[at], left[at], right[at])] for at in groups]))
    texts = np.array([*tokens, None], dtype=object)
    return list(zip(texts[left[chosen]].tolist(), texts[right[chosen]].tolist(), strict=True))


class _Table:
    """Tokens by hash: the sum of their characters, each times a power of an odd number, modulo 2**64."""

    def __init__(self, tokens: Sequence[str]) -> None:
        joined = "".join(tokens)
        self.lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._ends = self.lengths.cumsum()
        self._begins = self._ends - self.lengths
        powers = np.ones((2, len(joined) + 1), np.uint64)
        powers[:, 1:] = np.array([[_ODD], [pow(_ODD, -1, 1 << 64)]], np.uint64)
        self._powers, self._inverses = powers.cumprod(1, out=powers)
        mixed = (np.frombuffer(joined.encode("utf-32-le"), "<u4") + np.uint64(1)) * np.uint64(_ODD)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(_ODD)
        self._sums = np.append(np.uint64(0), (mixed * self._powers[:-1]).cumsum())
        self._hashes = self._hash(self._begins, self._ends)
        self._bits = len(tokens).bit_length() + _SPARE_BITS
        self._tables: list[Array] = []  # each has the tokens whose place in those before is another's
        left: Array = np.arange(len(tokens), dtype=np.int32)
        while len(left):
            places = self._places(self._hashes[left], len(self._tables))
            self._tables.append(np.full(1 << self._bits, -1, np.int32))
            self._tables[-1][places] = left
            left = left[self._tables[-1][places] != left]

    def pairs(self) -> tuple[Array, Array, Array]:
        """Return every way to cut a token in two tokens, as (token, left, right), ordered by token."""
        inside = np.ones(len(self._sums) - 1, bool)
        inside[self._begins] = False
        cuts: Array = np.flatnonzero(inside)
        whole: Array = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)[cuts]
        right = self._find(self._hash(cuts, self._ends[whole]))
        cuts, whole, right = (values[right >= 0] for values in (cuts, whole, right))
        left = self._find(self._hash(self._begins[whole], cuts))
        return whole[left >= 0], left[left >= 0], right[left >= 0]

    def joined(self, left: Array, right: Array) -> Array:
        """Return the tokens that pairs of tokens make, or -1."""
        return self._find(self._hashes[left] + self._hashes[right] * self._powers[self.lengths[left]])

    def _find(self, hashes: Array) -> Array:
        """Return the tokens with these hashes, or -1: int32 like `hashes`."""
        found = np.full(len(hashes), -1, np.int32)
        missed: Array = np.arange(len(hashes))
        for number, table in enumerate(self._tables):
            others = table[self._places(hashes[missed], number)]
            is_it = self._hashes[others] == hashes[missed]
            found[missed[is_it]] = others[is_it]
            missed = missed[~is_it & (others >= 0)]  # an empty place would have been taken
        return found

    def _hash(self, begins: Array, ends: Array) -> Any:
        return (self._sums[ends] - self._sums[begins]) * self._inverses[begins]

    def _places(self, hashes: Array, number: int) -> Any:
        return (hashes * np.uint64(_ODD + 2 * number)) >> np.uint64(64 - self._bits)


class _Origins:
    """Pairs that tokens are made of, and the last ranked of all merges in each token.

    Of two neighbours, the one with the later ranked merge in it was completed later.
    """

    def __init__(self, table: _Table) -> None:
        self._table = table
        self._left, self._right = np.full((2, len(table.lengths)), -1, np.int32)
        self._last = np.where(table.lengths == 1, _CHARACTER, _UNKNOWN).astype(np.int32)

    def likely(self, whole: Array, left: Array, right: Array) -> Array:
        """Return which pairs may make their token, bool like `whole`, and remember those that are left alone.

        `whole`: tokens of one length, after all shorter ones, with equal ones next to each other.
        """
        likely = ~self._never_meet(left, right, ~_alone(whole))
        whole, left, right = whole[likely], left[likely], right[likely]
        whole, left, right = (values[_alone(whole)] for values in (whole, left, right))
        self._left[whole], self._right[whole] = left, right
        last = self._last[np.stack([left, right])]
        self._last[whole] = np.where((last == _UNKNOWN).any(0), _UNKNOWN, np.maximum(whole, last.max(0)))
        return likely

    def _never_meet(self, left: Array, right: Array, is_asked: Array) -> Array:
        """Return which pairs can't be next to each other: bool like `left`, and False where not asked.

        The two are taken apart again at the cut, the later one first. If the inner half and its neighbour
        make a token that ranks before a merge still to come, that token would have been made instead.
        """
        never = np.zeros(len(left), bool)
        rows = np.flatnonzero(is_asked)
        left, right = left[rows], right[rows]
        while len(rows):
            last_left, last_right = self._last[left], self._last[right]
            goes_on = (last_left != last_right) & (np.minimum(last_left, last_right) != _UNKNOWN)
            is_left = (last_left > last_right)[goes_on]
            rows, left, right = rows[goes_on], left[goes_on], right[goes_on]
            later = np.where(is_left, left, right)
            left = np.where(is_left, self._right[later], left)
            right = np.where(is_left, right, self._left[later])
            is_to_come = self._last[later] > np.maximum(self._last[left], self._last[right])
            made = self._table.joined(left, right)
            crosses = (made >= 0) & (made < np.where(is_to_come, self._last[later], later))
            never[rows[crosses]] = True
            rows, left, right = rows[~crosses], left[~crosses], right[~crosses]
        return never


def _alone(values: Array) -> Any:
    """Return which values differ from both neighbours: bool like `values`."""
    return (np.diff(values, prepend=-1) != 0) & (np.diff(values, append=-1) != 0)
