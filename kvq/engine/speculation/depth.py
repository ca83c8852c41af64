"""How many drafts pay: by how often they were right, and by what steps and drafting were seen to cost.

A step over B sequences that drafts n tokens in all, in d passes of the draft, takes verify(B, n) + d *
draft(B). The j-th draft of a sequence whose drafts are right with probability a adds a^j tokens. So drafts
are taken in the order of what they add, as many as give the most tokens a second; none where a step without
them gives more. Source: Leviathan et al. 2023, section 3; here the costs are measured, and sequences weighed
one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvq.scheduler import Branch, CostModel
from kvq.scheduler.costs import BySize

_HOPED = 0.7  # share of right drafts before any was seen
_HOPE = 4.0  # drafts that it counts as
_SHARED = 8.0  # drafts that the share of all requests counts as in that of one
_MEMORY = 0.98  # of what was seen, a step
_GAIN = 1.02  # at least so much must be won
_TRIALS = 2  # times that a draft is asked for by so many sequences before it is known what that costs


@dataclass(slots=True)
class Seen:
    """Drafts that were looked at, and those of them that were right; older ones count less."""

    looked_at: float = 0.0
    right: float = 0.0

    def add(self, looked_at: int, right: int) -> None:
        """Count a step's."""
        self.looked_at = self.looked_at * _MEMORY + looked_at
        self.right = self.right * _MEMORY + right

    def fade(self) -> None:
        """Let a step pass without any: what was seen long ago may have changed."""
        self.looked_at *= _MEMORY
        self.right *= _MEMORY

    def share(self, prior: float, weight: float) -> float:
        """The share of right ones, with a prior that counts as so many drafts."""
        return (self.right + prior * weight) / (self.looked_at + weight)


@dataclass(slots=True)
class Depth:
    """Decides how many drafts every sequence of a step gets."""

    costs: CostModel
    takes_passes: bool  # drafting takes a pass of a model for each further token
    draft_s: BySize = field(default_factory=BySize)  # of one pass, by the number of sequences
    seen: Seen = field(default_factory=Seen)  # of all requests
    _by_branch: dict[Branch, Seen] = field(default_factory=dict)

    def choose(self, most: Mapping[Branch, int], num_decodes: int) -> dict[Branch, int]:
        """How many drafts to make, for those of the branches that shall have some; `most`: at most."""
        usual = self.costs.decode_s(num_decodes)
        if usual <= 0 or not any(most.values()) or not self.costs.knows_decode(num_decodes):
            return {}
        if self.takes_passes and self.draft_s.count(len(most)) < _TRIALS:
            return dict.fromkeys(most, 1)
        common, worth = self.seen.share(_HOPED, _HOPE), []
        for branch, count in most.items():
            own = self._by_branch.get(branch)
            share = common if own is None else own.share(common, _SHARED)
            value = 1.0
            for number in range(1, count + 1):
                value *= share
                worth.append((value, number, branch))
        worth.sort(key=lambda one: -one[0])
        best, best_rate, tokens, passes = 0, _GAIN * num_decodes / usual, float(num_decodes), 0
        for index, (value, number, _) in enumerate(worth, 1):
            tokens, passes = tokens + value, max(passes, number)
            rate = tokens / self._seconds(num_decodes, index, passes, len(most))
            if rate > best_rate:
                best, best_rate = index, rate
        chosen: dict[Branch, int] = {}
        for _, _, branch in worth[:best]:
            chosen[branch] = chosen.get(branch, 0) + 1
        if not chosen:
            self.seen.fade()
        return chosen

    def learn(self, branch: Branch, drafted: int, right: int) -> None:
        """So many drafts of a branch were right before the first that was wrong."""
        looked_at = min(drafted, right + 1)
        self.seen.add(looked_at, right)
        self._by_branch.setdefault(branch, Seen()).add(looked_at, right)

    def forget(self, branch: Branch) -> None:
        """A branch ended."""
        self._by_branch.pop(branch, None)

    def _seconds(self, num_decodes: int, num_drafts: int, passes: int, drafting: int) -> float:
        seconds = self.costs.verify_s(num_decodes, num_drafts)
        if self.takes_passes:
            seconds += passes * self.draft_s(drafting)
        return seconds
