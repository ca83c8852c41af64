"""One request of a simulated load."""

from array import array
from dataclasses import dataclass

from kvq.scheduler import Priority

_MULTIPLIER = 2_654_435_761  # Knuth's, for spreading numbers
_ANSWERS = 1 << 31  # first tokens that answers may have


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One request to come, its output's length known to nobody but the simulation."""

    number: int  # by arrival
    arrival_s: float
    prompt: "array[int]"  # token ids
    output_tokens: int  # at least 1
    kept_tokens: int | None = None  # of these, after which its client leaves; None: it stays to the end
    is_cut: bool = False  # it was longer than the context
    session: str = ""  # whose requests go to the same replica, if routing asks
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE

    @property
    def tokens_taken(self) -> int:
        """Of its output, what is generated for it."""
        return self.output_tokens if self.kept_tokens is None else self.kept_tokens

    def answer(self, first: int, count: int) -> "array[int]":
        """Its output's tokens `first` and those after it: made up, the same every time."""
        begin = self.number * _MULTIPLIER % _ANSWERS + first
        return array("I", range(begin, begin + count))
