"""How many drafts pay: by how often they were right, and by what steps and drafting were seen to cost.

A step over B sequences that drafts n tokens in all, in d passes of the draft, takes verify(B, n) + d *
draft(B). The j-th draft of a sequence whose drafts are right with probability a adds a^j tokens. So drafts
are taken in the order of what they add, as many as give the most tokens a second; none where a step without
them gives more. Source: Leviathan et al. 2023, section 3; here the costs are measured, and sequences weighed
one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvq.scheduler.costs import BySize, CostModel
from kvq.scheduler.holders import held
from kvq.scheduler.request import Branch
from kvq.scheduler.scheduler import Scheduler

MOST_DRAFTS = 16  # of a sequence in a step
_HOPED = 0.7  # share of right drafts before any was seen
_HOPE = 4.0  # drafts that it counts as
_SHARED = 8.0  # drafts that the share of all requests counts as in that of one
_MEMORY = 0.98  # of what was seen, a step
_GAIN = 1.02  # at least so much must be won
_TRIALS = 2  # times that a draft is asked for by so many sequences before it is known what that costs
_REST = 16  # steps of the same branches after one that was worth no draft, until the next is weighed


def drafts_allowed(scheduler: Scheduler, k: int) -> dict[Branch, int]:
    """Who goes on by a token in the next step, and how many drafts each may have behind it, k at most.

    None while prompts wait for a part of a step: what drafts take, those would have to do without.
    """
    manager, allowed = scheduler.manager, {}
    k = 0 if scheduler.prompts_lack_time else k
    for branch in scheduler.holders.active:
        if branch.goal - held(branch).length == 1 + branch.rewound:
            most = min(k, branch.most_drafts)
            if manager.blocks.states is not None:  # drafts may not leave the block in which the state lies
                most = min(most, manager.block_size - 1 - (len(branch.tokens) - 1) % manager.block_size)
            allowed[branch] = max(0, most)
    return allowed


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
    adapts: bool = True  # False: as many as there may be, whatever they cost
    draft_s: BySize = field(default_factory=BySize)  # of one pass, by the number of sequences
    seen: Seen = field(default_factory=Seen)  # of all requests
    rests: int = 0  # further steps that need not be asked about while the branches stay the same
    _by_branch: dict[Branch, Seen] = field(default_factory=dict)

    def choose(self, most: Mapping[Branch, int], num_decodes: int) -> dict[Branch, int]:
        """How many drafts to make, for those of the branches that shall have some; `most`: 1 or more.

        None, whatever they might bring, while decodes of that number have to be measured alone: neither what
        drafts add nor what prefill adds were known, and prefill waits for that.
        """
        self.rests = 0
        costs, usual = self.costs, self.costs.decode_s(num_decodes)
        if not num_decodes or usual <= 0 or not costs.prefill_share(num_decodes):
            return {}
        if self.adapts and not costs.knows_decode(num_decodes):
            return {}
        chosen = self._weigh(most, num_decodes, usual) if self.adapts else dict(most)
        if not chosen:
            self.rests = _REST
            if most:
                self.seen.fade()
        return chosen

    def rest(self, steps: int = 1) -> None:
        """So many steps pass without being asked about, `rests` at most."""
        self.rests -= steps
        for _ in range(steps):
            self.seen.fade()

    def _weigh(self, most: Mapping[Branch, int], num_decodes: int, usual: float) -> dict[Branch, int]:
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
