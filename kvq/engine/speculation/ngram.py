"""Drafts by n-grams: what followed the last tokens when they came before.

Sources: Saxena 2023, "Prompt Lookup Decoding"; Oliaro et al. 2024, "SuffixDecoding", for outputs of other
requests.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

_LENGTHS = (8, 4, 3, 2)  # of n-grams, the longest first
_MOST_TENANTS = 256  # whose outputs are kept
_MOST_TOKENS = 1 << 16  # of one tenant's outputs; at twice as many the older half goes


class NGrams:
    """A text, and where each n-gram of it came last. Costs a few dictionary entries a token."""

    def __init__(self) -> None:
        self.tokens = array("I")
        self._last: dict[bytes, int] = {}  # n-gram -> index behind its last coming but the newest tokens'
        self._indexed = 0  # tokens whose n-grams are known

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with tokens."""
        self.tokens.extend(tokens)

    def following(self, context: "array[int]", count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known end of `context`; [] where none is known.

        Where they run into the end of the text it is taken to begin anew there, as of what repeats itself.
        """
        self._index()
        for length in _LENGTHS if count else ():
            if len(context) < length:
                continue
            at = self._last.get(context[-length:].tobytes())
            if at is not None:
                return self._from(at, count)
        return []

    def _index(self) -> None:
        """Know the n-grams that end before the last token, whose following one is there."""
        tokens, last = self.tokens, self._last
        for end in range(max(self._indexed, 1), len(tokens)):
            for length in _LENGTHS:
                if end >= length:
                    last[tokens[end - length : end].tobytes()] = end
        self._indexed = max(self._indexed, len(tokens))

    def _from(self, at: int, count: int) -> list[int]:
        found = self.tokens[at : at + count].tolist()
        period = len(self.tokens) - at
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class Recent:
    """Outputs of requests that ended, by who may know of them: timing would tell others what was said."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most = most_tokens
        self._texts: OrderedDict[tuple[str, str | None], NGrams] = OrderedDict()

    def add(self, owner: tuple[str, str | None], tokens: Sequence[int]) -> None:
        """Keep an output of a tenant's request; the tenants heard of least recently are forgotten."""
        text = self._texts.setdefault(owner, NGrams())
        self._texts.move_to_end(owner)
        text.extend(tokens)
        if len(text.tokens) > 2 * self._most:
            newer = NGrams()
            newer.extend(text.tokens[-self._most :])
            self._texts[owner] = newer
        if len(self._texts) > _MOST_TENANTS:
            self._texts.popitem(last=False)

    def of(self, owner: tuple[str, str | None]) -> NGrams | None:
        """What may be told to a request of that tenant."""
        return self._texts.get(owner)
