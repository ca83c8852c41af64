"""Trying tokens on a grammar: what may come behind drafts."""

from typing import TYPE_CHECKING

from torch import Tensor

from kvq.errors import RequestError

if TYPE_CHECKING:  # llguidance is not needed without a grammar
    from kvq.engine.grammar.matcher import Matcher


class Walk:
    """Goes on from where a request stands in its grammar, which stays there.

    Ends where no token can follow.
    """

    def __init__(self, matcher: "Matcher") -> None:
        self._matcher = matcher
        self._moved: Matcher | None = None
        self.is_over = False

    def mask(self) -> Tensor | None:
        """What may come next, as `Matcher.mask`; None behind the end."""
        if self.is_over:
            return None
        try:
            return (self._moved or self._matcher).mask()
        except RequestError:
            self.is_over = True
            return None

    def accept(self, token: int) -> None:
        """Go on by a token; where it isn't allowed, or is the last one, this is over."""
        if self.is_over:
            return
        if self._moved is None:
            self._moved = self._matcher.fork()
        try:
            self._moved.accept(token)
            self.is_over = self._moved.is_finished
        except RequestError:
            self.is_over = True
