"""Drafts by n-grams: what followed the last tokens when they came before.

Sources: Saxena 2023, "Prompt Lookup Decoding"; Oliaro et al. 2024, "SuffixDecoding", for outputs of other
requests.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.sampler import Drafted
from kvq.engine.speculation.proposer import Jobs, Proposer
from kvq.scheduler import Branch, StepPlan

_LENGTHS = (8, 4, 3, 2)  # of n-grams, the longest first
_AT_ONCE = 4096  # tokens that are indexed in a step: a long prompt holds up nobody
_MOST_TOKENS = 1 << 14  # of one tenant's outputs; at twice as many the older half goes
_MOST_IN_ALL = 1 << 17  # of all tenants; a token takes some 600 bytes, most of them in the dictionary


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
        """Know more n-grams that end before the last token, whose following one is there."""
        tokens, last, first = self.tokens, self._last, max(self._indexed, 1)
        until = min(len(tokens), first + _AT_ONCE)
        for end in range(first, until):
            for length in _LENGTHS:
                if end >= length:
                    last[tokens[end - length : end].tobytes()] = end
        self._indexed = max(self._indexed, until)

    def _from(self, at: int, count: int) -> list[int]:
        found = self.tokens[at : at + count].tolist()
        period = len(self.tokens) - at
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class Recent:
    """Outputs of requests that ended, by who may know of them: timing would tell others what was said."""

    def __init__(self, most_tokens: int = _MOST_TOKENS, most_in_all: int = _MOST_IN_ALL) -> None:
        self._most = most_tokens
        self._most_in_all = most_in_all
        self._total = 0
        self._texts: OrderedDict[tuple[str, str | None], NGrams] = OrderedDict()

    def add(self, owner: tuple[str, str | None], tokens: Sequence[int]) -> None:
        """Keep an output of a tenant's request; the tenants heard of least recently are forgotten."""
        if not tokens:
            return
        text = self._texts.setdefault(owner, NGrams())
        self._texts.move_to_end(owner)
        self._total -= len(text.tokens)
        text.extend(tokens)
        if len(text.tokens) > 2 * self._most:
            newer = NGrams()
            newer.extend(text.tokens[-self._most :])
            text = self._texts[owner] = newer
        self._total += len(text.tokens)
        while self._total > self._most_in_all and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._total -= len(oldest.tokens)

    def of(self, owner: tuple[str, str | None]) -> NGrams | None:
        """What may be told to a request of that tenant."""
        return self._texts.get(owner)


class Lookup(Proposer):
    """Guesses what followed before: in the request's own text, else in late answers to its tenant."""

    takes_passes = False

    def __init__(self) -> None:
        self._texts: dict[Branch, NGrams] = {}
        self._recent = Recent()
        self._found: dict[Branch, list[int]] = {}

    def most(self, branch: Branch, job: Job, limit: int) -> int:
        """As many as are found and, under a grammar, allowed."""
        text = self._texts.setdefault(branch, NGrams())
        text.extend(branch.tokens[len(text.tokens) :])
        found = text.following(branch.tokens, limit)
        if not found and (others := self._recent.of(_owner(job))) is not None:
            found = others.following(branch.tokens, limit)
        matcher = job.results[job.index_of(branch)].matcher
        if found and matcher is not None:
            found = found[: matcher.num_allowed(found)]
        self._found[branch] = found
        return len(found)

    def propose(self, plan: StepPlan, jobs: Jobs) -> dict[int, list[Drafted]]:
        """What `most` found."""
        return {
            i: [Drafted(token) for token in self._found[plan.branches[i]][:count]]
            for i, count in enumerate(plan.drafts)
            if count
        }

    def begin_anew(self) -> None:
        """Forget all answers."""
        self._recent = Recent()

    def forget(self, branch: Branch, job: Job) -> None:
        """Keep what was answered for later requests."""
        self._texts.pop(branch, None)
        self._found.pop(branch, None)
        self._recent.add(_owner(job), branch.tokens[job.request.prompt_length :])


def _owner(job: Job) -> tuple[str, str | None]:
    return job.request.tenant, job.request.cache_salt
