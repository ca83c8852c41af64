"""Draft depth: chooses the number of drafts that pays off, given acceptance rates and step costs.

A step over B sequences that drafts n tokens in total, in d passes of the draft model, takes verify(B, n) +
d * draft(B). The j-th draft of a sequence with acceptance rate a adds a^j tokens. Drafts are therefore chosen
in descending order of the tokens they add, up to the number that maximizes tokens per second; none are chosen
if a step without drafts is faster. Source: Leviathan et al. 2023, section 3; here, the costs are measured,
and each sequence has its own rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvq.scheduler.costs import BySize, CostModel
from kvq.scheduler.request import Branch
from kvq.scheduler.running import held
from kvq.scheduler.scheduler import Scheduler

MOST_DRAFTS = 16  # per sequence and step
_HOPED = 0.7  # assumed acceptance rate before any draft was checked
_HOPE = 4.0  # number of drafts that this prior counts as
_SHARED = 8.0  # drafts that the rate of all requests counts as when it is the prior for one request
_MEMORY = 0.98  # weight of older counts, per step
_GAIN = 1.02  # minimum relative gain in tokens per second
_TRIALS = 2  # draft passes for a number of sequences before their cost is known
_REST = 16  # steps of the same branches without a new choice after a step in which no draft paid off


def drafts_allowed(scheduler: Scheduler, k: int) -> dict[Branch, int]:
    """Return the branches that decode in the next step, each with its allowed number of drafts, at most `k`.

    No drafts are allowed while prompts wait for prefill tokens, since drafts would reduce their share.
    """
    manager, allowed = scheduler.manager, {}
    k = 0 if scheduler.prompts_lack_time else k
    for branch in scheduler.running.active:
        if branch.goal - held(branch).length == 1 + branch.rewound:
            most = min(k, branch.most_drafts)
            if manager.blocks.states is not None:  # drafts must stay in the block of the state
                most = min(most, manager.block_size - 1 - (len(branch.tokens) - 1) % manager.block_size)
            allowed[branch] = max(0, most)
    return allowed


@dataclass(slots=True)
class _Seen:
    """Counts of checked and accepted drafts. Older counts weigh less."""

    looked_at: float = 0.0
    right: float = 0.0

    def add(self, looked_at: int, right: int) -> None:
        """Count the drafts of one step."""
        self.looked_at = self.looked_at * _MEMORY + looked_at
        self.right = self.right * _MEMORY + right

    def fade(self) -> None:
        """Fade the counts by one step without adding drafts."""
        self.looked_at *= _MEMORY
        self.right *= _MEMORY

    def share(self, prior: float, weight: float) -> float:
        """Return the acceptance rate, including a prior that counts as `weight` drafts."""
        return (self.right + prior * weight) / (self.looked_at + weight)


@dataclass(slots=True)
class Depth:  # D257: depth by measured costs; every 64th step has no drafts
    """Selector of the number of drafts for each sequence of a step."""

    costs: CostModel
    takes_passes: bool  # each further draft token takes another pass of a model
    adapts: bool = True  # False: as many as allowed, regardless of their cost
    draft_s: BySize = field(default_factory=BySize)  # time of one pass, keyed by the number of sequences
    seen: _Seen = field(default_factory=_Seen)  # of all requests
    rests: int = 0  # upcoming steps without a new choice while the branches stay the same
    _by_branch: dict[Branch, _Seen] = field(default_factory=dict)

    def choose(self, most: Mapping[Branch, int], num_decodes: int) -> dict[Branch, int]:
        """Return the number of drafts to make per branch. `most`: the maximum per branch, each at least 1.

        No drafts are made while this number of decodes has to be measured alone; otherwise, the costs of
        drafts and prefill would both stay unknown, and prefill waits until its costs are known.
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
        """Skip the choice for `steps` steps, which must be at most `rests`."""
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
        """Record that the first `right` of a branch's `drafted` drafts were accepted."""
        looked_at = min(drafted, right + 1)
        self.seen.add(looked_at, right)
        self._by_branch.setdefault(branch, _Seen()).add(looked_at, right)

    def forget(self, branch: Branch) -> None:
        """Drop the counts of an ended branch."""
        self._by_branch.pop(branch, None)

    def _seconds(self, num_decodes: int, num_drafts: int, passes: int, drafting: int) -> float:
        seconds = self.costs.verify_s(num_decodes, num_drafts)
        if self.takes_passes:
            seconds += passes * self.draft_s(drafting)
        return seconds
