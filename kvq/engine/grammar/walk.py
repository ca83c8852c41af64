"""Grammar walk: tries draft tokens on a grammar to find the tokens allowed after them."""

from typing import TYPE_CHECKING

from torch import Tensor

from kvq.errors import RequestError

if TYPE_CHECKING:  # llguidance is not needed without a grammar
    from kvq.engine.grammar.matcher import Matcher


class Walk:
    """Trial continuation from a request's position in its grammar. The request's own state is unchanged.

    The walk ends where no token can follow.
    """

    def __init__(self, matcher: "Matcher") -> None:
        self._matcher = matcher
        self._moved: Matcher | None = None
        self.is_over = False

    def mask(self) -> Tensor | None:
        """Return the tokens allowed next, as `Matcher.mask` does, or None after the end of the walk."""
        if self.is_over:
            return None
        try:
            return (self._moved or self._matcher).mask()
        except RequestError:
            self.is_over = True
            return None

    def accept(self, token: int) -> None:
        """Advance by one token. The walk ends at a token that isn't allowed or that completes the text."""
        if self.is_over:
            return
        if self._moved is None:
            self._moved = self._matcher.fork()
        try:
            self._moved.accept(token)
            self.is_over = self._moved.is_finished
        except RequestError:
            self.is_over = True
